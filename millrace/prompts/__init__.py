"""Prompts: built-in sums and chains of sums, files of the user, and prompts of other packages."""
