"""The pipeline in simulated time: the product's rules, durations from a cost model, no process and no tensor."""
