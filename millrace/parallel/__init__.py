"""The trainer on several ranks: who they are, and what of the policy and the batch each of them holds."""
