"""Conversations as tokens: a model is spoken to in its own chat template."""
