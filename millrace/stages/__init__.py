"""The stages of a run: a process each; generators, scorers and teachers may have several.

  stage         consumes               waits for                      produces                   unblocks
  bootstrap     training prompts       nothing                        the start model            every other stage
  generate      weights, prompts       weights; room under the bound  groups of trajectories     score, teach
  score         trajectories           the next part of its share     a score per trajectory     train
  teach         trajectories           the next part of its share     a teacher's log π per row  train
  train         scored groups          stragglers; a step's worth     versions, drops counted    sync_weights, generate
  sync_weights  versions               a newer one; acknowledgements  weights at each generator  generate
  evaluate      checkpoints            one that is due                accuracies, an early stop  promote, train
  promote       the latest checkpoint  nothing                        the promoted model         nothing

`verify` and `compare` read a stored run. In a replay `train` and `score` do too, and no stage waits for another.
"""
