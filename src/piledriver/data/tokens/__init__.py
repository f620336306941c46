"""Token shards: the format, tokenising a corpus, opening and verifying the result."""
