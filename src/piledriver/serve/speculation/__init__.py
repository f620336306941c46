"""Speculative decoding: guess the next tokens cheaply, verify them in one step.

A draft token is accepted only if it is the token that the model draws at its place with its own random number, so the
output is the same as without speculation.
"""

from piledriver.serve.speculation.make import Speculator, make_speculator

__all__ = ["Speculator", "make_speculator"]
