"""Trajectories on disk, their order, and the accounting of what became of each."""
