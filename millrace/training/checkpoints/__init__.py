"""The trainer's checkpoints as tensors, written by each rank and restored by any number of ranks."""
