"""Load a checkpoint into live models and optimizers."""
