"""Trees in files: safetensors, msgpack, pickles."""
