"""All runs at once: which the table shows, and how several compare."""
