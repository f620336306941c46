"""A local page for live and finished runs: bounded readers of run folders, an HTTP server on loopback, one HTML file.

Imports no torch, so that the page opens at once.
"""
