"""Partners of a policy between its turns: tools, games, simulated users."""
