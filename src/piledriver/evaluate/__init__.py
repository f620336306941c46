"""Floor 6: evaluation: bits per byte by source, perplexities, multiple choice, EleutherAI's harness."""

from piledriver.evaluate.bits import DocumentScore, Figures, bits_per_byte, summarise
from piledriver.evaluate.choices import Choice, multiple_choice
from piledriver.evaluate.open_model import open_scorer
from piledriver.evaluate.scorers import Scorer, TransformerScorer, TransformersScorer

__all__ = [
    "Choice",
    "DocumentScore",
    "Figures",
    "Scorer",
    "TransformerScorer",
    "TransformersScorer",
    "bits_per_byte",
    "multiple_choice",
    "open_scorer",
    "summarise",
]
