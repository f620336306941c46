"""Pipeline stages of our own and of Hugging Face models."""
