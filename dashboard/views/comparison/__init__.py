"""The first pages of a comparison of runs."""
