"""Runs beside each other: the first pages of a comparison."""
