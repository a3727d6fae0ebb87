"""Pure functions from RunData to the numbers that a chart or table shows."""
