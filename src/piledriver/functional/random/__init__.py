"""Counter-based random keys and the Philox generator."""
