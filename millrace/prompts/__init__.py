"""What the policy is asked: built-in sums, files of the user, and prompts of other packages."""
