"""The trainer's checkpoints as tensors: what each rank writes, and how any number of ranks restores them."""
