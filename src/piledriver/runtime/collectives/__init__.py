"""Collectives over nested structures, barriers, and checks that all ranks agree."""
