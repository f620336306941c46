"""Shard any torch `DataLoader` across processes, with exact resume."""
