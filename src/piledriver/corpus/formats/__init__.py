"""Markup and document formats to plain text, one folder or module per format."""
