"""A compiled scanner for plain HTML fragments."""
