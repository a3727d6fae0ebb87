"""From stored runs to a cost model of their machine."""
