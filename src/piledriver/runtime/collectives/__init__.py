"""Collectives over nested structures, barriers, and agreement checks."""
