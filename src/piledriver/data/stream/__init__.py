"""Token shards to batches: windows, mixture order, the stream, a prefetching loader."""
