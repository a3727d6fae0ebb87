"""From a config and a machine to the best config on it: candidates, what they need and do, and why the others lose."""
