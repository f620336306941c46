"""Tokenizer file formats, one module each."""
