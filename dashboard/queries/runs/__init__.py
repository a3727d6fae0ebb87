"""Queries over several runs: the table of all runs, and comparisons."""
