"""The policy as a generator of tokens: `transformers` or vLLM behind one interface."""
