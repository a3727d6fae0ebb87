"""What a stage uses of its machine."""
