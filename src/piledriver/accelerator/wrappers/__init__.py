"""The thin wrappers around optimizers and schedulers that decide when to step."""
