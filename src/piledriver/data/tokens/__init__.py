"""Token shards: tokenize a corpus, open and verify the result."""
