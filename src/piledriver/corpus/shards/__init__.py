"""Text shards: read, write and seek in `.jsonl.zst` files."""
