"""The train stage: the loops of a campaign and of a replay, and what they need between streams and trainer."""
