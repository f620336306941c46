"""Floor 8: the whole pipeline on one machine: corpus, tokenizer, model, bits per byte by domain, an HTML report."""

from piledriver.demo.run import run_demo

__all__ = ["run_demo"]
