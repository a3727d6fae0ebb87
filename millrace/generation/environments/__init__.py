"""What a policy talks to between its turns: tools, games, simulated users."""
