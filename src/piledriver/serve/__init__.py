"""Floor 6: a trained model at work. `generate` continues a text."""

from piledriver.serve.generate import Sampling, generate

__all__ = ["Sampling", "generate"]
