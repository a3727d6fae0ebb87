"""Sections of `training`: the parameters of losses, and how the optimizer moves the weights, what a step trains."""
