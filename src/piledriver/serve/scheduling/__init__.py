"""Which tokens run in the next step, and where their keys and values lie. Pure Python: no torch."""
