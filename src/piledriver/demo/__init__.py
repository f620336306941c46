"""Floor 7: the whole way on one machine, for a newcomer: corpus, tokenizer, model, bits per byte by domain, a page."""

from piledriver.demo.run import run_demo

__all__ = ["run_demo"]
