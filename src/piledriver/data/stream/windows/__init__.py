"""Windows of tokens: where they are in the shards, how documents are packed into them, how a batch is copied out."""
