"""The staleness bound, and the answer to a collapse of training: decisions from a run's measurements."""
