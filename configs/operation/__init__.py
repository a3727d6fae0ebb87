"""Sections of a run's operation: where stages run, the limits they run under, and what was predicted of them."""
