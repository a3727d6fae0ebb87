"""vLLM as an engine, and the code that it loads in its own processes."""
