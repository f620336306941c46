"""Search layouts: candidates over all axes, the best few, a reason for every other one, and what would fit."""
