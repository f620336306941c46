"""Tokens to text, piece by piece: incremental detokenisation and stop strings."""
