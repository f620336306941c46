"""What a run minimises: the next-token loss, unless a subclass changes the model, its targets or its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piledriver.data.stream.loader import TokenBatch
from piledriver.models import Transformer
from piledriver.train.setup import RunComponents


class Objective:
    """The next-token loss. Subclasses distil from a teacher, or train with quantised weights."""

    def prepare(self, components: RunComponents, model: Transformer) -> None:
        """Change a model on the meta device, before the layout is applied; raise if the layout is not supported."""

    def targets(self, batch: TokenBatch, context: Mapping[str, Any]) -> Any:
        """Return what the model's `cross_entropy` takes as targets; `context` keeps documents apart in attention."""
        return batch.labels
