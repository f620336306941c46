"""Checkpoint formats: torch DCP and Hugging Face folders, conversion between them."""
