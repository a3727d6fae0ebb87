"""What a policy talks to between its turns: tools, games, simulated users. One file each behind one small interface."""
