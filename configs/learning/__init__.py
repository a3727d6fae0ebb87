"""Sections of `training`: the parameters of losses, how the optimizer moves the weights, and what a step trains."""
