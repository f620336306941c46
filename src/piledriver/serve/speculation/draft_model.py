"""Draft-model speculation: a small model of the same vocabulary guesses (Leviathan et al., 2022).

The draft draws with the random numbers of the target, so that where their distributions agree, their tokens do.
"""

from __future__ import annotations

from typing import Any

import torch

from piledriver.kernels.sampling.reference import draw_row
from piledriver.models import KVCache, Transformer
from piledriver.models.codes import first_weight
from piledriver.serve.scheduling.sequence import Sequence
from piledriver.serve.speculation.speculator import AcceptanceRate


class DraftModelSpeculator:
    """Runs the draft model on each sequence with a cache of its own."""

    def __init__(self, model: Transformer) -> None:
        self._model = model.eval()
        weight = first_weight(model)
        self._device, self._dtype = weight.device, model.compute_dtype or weight.dtype
        self._caches: dict[int, tuple[KVCache, list[int]]] = {}
        self._rates: dict[int, AcceptanceRate] = {}

    @torch.inference_mode()
    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """See `Speculator`."""
        config = self._model.config
        if not self._rates.setdefault(sequence.number, AcceptanceRate()).pays():
            return []
        if sequence.number not in self._caches:
            length = min(sequence.limit, config.max_positions)
            cache = KVCache(config, 1, length, device=self._device, dtype=self._dtype)
            self._caches[sequence.number] = cache, []
        cache, computed = self._caches[sequence.number]
        count = min(count, cache.length - len(sequence.tokens))
        known = list(sequence.tokens)
        same = 0
        while same < min(len(computed), len(known) - 1) and computed[same] == known[same]:
            same += 1
        del computed[same:]
        owner: Any = sequence.owner
        sampler, guessed = owner.sampler, []
        params = sampler.params
        for ahead in range(count):
            fresh = known[len(computed) :]
            places = torch.arange(len(computed), len(known), device=self._device)[None]
            logits = self._model(torch.tensor([fresh], device=self._device), cache=cache, positions=places)[0, -1]
            computed += fresh
            uniform = sampler.uniform(sequence.known - sequence.prompt_length + ahead)
            token = draw_row(logits.float(), params.temperature, uniform, params.top_k, params.top_p, params.min_p)
            guessed.append(token)
            known.append(token)
        return guessed

    def observe(self, sequence: Sequence, *, proposed: int, accepted: int) -> None:
        """See `Speculator`."""
        self._rates[sequence.number].observe(proposed, accepted)

    def forget(self, sequence: Sequence) -> None:
        """See `Speculator`."""
        self._caches.pop(sequence.number, None)
        self._rates.pop(sequence.number, None)
