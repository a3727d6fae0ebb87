"""The planner, measured: how well it predicts, and how fast."""
