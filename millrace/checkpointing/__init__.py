"""The trainer's checkpoints as tensors: what each rank keeps of them, and how any number of ranks gets them back."""
