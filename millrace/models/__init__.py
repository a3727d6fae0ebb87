"""A Hugging Face folder as a module."""
