"""Make the speculator that the engine's config asks for."""

from __future__ import annotations

from piledriver.models import Transformer
from piledriver.serve.config import EngineConfig
from piledriver.serve.errors import ServeError
from piledriver.serve.speculation.draft_model import DraftModelSpeculator
from piledriver.serve.speculation.ngram import NgramSpeculator
from piledriver.serve.speculation.speculator import Speculator

__all__ = ["Speculator", "make_speculator"]


def make_speculator(config: EngineConfig, draft_model: Transformer | None) -> Speculator | None:
    """Return the speculator, or None without speculation."""
    if config.speculate == "none":
        return None
    if config.speculate == "ngram":
        return NgramSpeculator()
    if draft_model is None:
        raise ServeError("speculate is 'draft', but there is no draft model", fix="give draft_model")
    return DraftModelSpeculator(draft_model)
