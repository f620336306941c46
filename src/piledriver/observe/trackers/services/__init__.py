"""One tracking service per module, each of which imports its package when it starts."""
