"""From gradients to new weights: which samples each update takes, its learning rate, AdamW, and what stays frozen."""
