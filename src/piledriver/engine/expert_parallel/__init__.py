"""Expert parallelism: experts sharded across ranks."""
