"""The trainer on several ranks: who they are, which part of policy and batch each has, and how rank 0 leads them."""
