"""Context parallelism: sequences sharded across ranks."""
