"""The train stage: the loops of a campaign and of a replay, between streams and trainer."""
