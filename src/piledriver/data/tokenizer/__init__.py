"""Tokenizers: open any common format, encode with the fastest exact library, train new ones."""
