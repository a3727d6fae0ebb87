"""Predicts a campaign before it runs: costs of its parts, a simulation of its stages, and the best config."""
