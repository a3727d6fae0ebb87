"""From what is known of a run to the numbers that a chart or table shows: pure functions over arrays."""
