"""Tokenizers: load any common format, choose the fastest exact encoder, train new ones."""
