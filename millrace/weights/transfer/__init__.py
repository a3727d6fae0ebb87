"""Which bytes of a policy version go from which trainer rank to which generator worker, and in what order.

    layout of the trainer's ranks ──┐
    layouts of the generators ──────┴─► plan_transfer ─► TransferPlan ─► hops of a rank

Pure functions of shapes: nothing here holds a tensor, opens a connection or knows of processes.
"""
