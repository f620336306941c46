"""JATS and NLM articles to plain text."""
