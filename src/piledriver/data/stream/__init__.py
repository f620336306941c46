"""Token shards to batches: window locations, mixture order, packing, prefetching loader."""
