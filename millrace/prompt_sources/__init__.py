"""Where prompts come from: the built-in sums, files, and what other packages list."""
