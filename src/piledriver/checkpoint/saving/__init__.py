"""Save a checkpoint: plan, stage, write and commit."""
