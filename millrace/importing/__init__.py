"""Models from elsewhere, as folders that trainer and engines take as they are."""
