"""What a campaign will cost, before it runs."""
