"""Run a scheduled step: cache pages, the forward pass, sampling, CUDA graphs."""
