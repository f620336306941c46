"""Checkpoint folders of `transformers`: config.json and safetensors, one file or sharded. Pickle is never read."""
