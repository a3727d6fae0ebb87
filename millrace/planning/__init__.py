"""What a campaign takes, before it runs: costs of its parts, a simulation of its stages, and the best config."""
