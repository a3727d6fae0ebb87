"""Tokens in, tokens with their log μ out: engines, and environments between the policy's turns."""
