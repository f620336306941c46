"""PDF files to plain text."""
