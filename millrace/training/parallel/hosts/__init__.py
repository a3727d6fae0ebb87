"""A trainer over several hosts: how their launchers find each other, start together and end together."""
