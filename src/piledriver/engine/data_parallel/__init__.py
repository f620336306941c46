"""Data parallelism: ZeRO sharding, gradient reducers and synchronised buffers."""
