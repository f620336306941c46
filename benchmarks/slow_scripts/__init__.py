"""Twelve deliberately slow training loops, each with the change that makes it fast."""
