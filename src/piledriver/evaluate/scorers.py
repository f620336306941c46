"""One interface to models that can be scored: our `Transformer` in any layout, causal models of `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.engine.compile import eager
from piledriver.engine.mesh import Mesh
from piledriver.engine.state import state_of
from piledriver.models import Transformer
from piledriver.models.codes import first_weight
from piledriver.models.decoding import NextLogits, cached_logits, decode, most_likely
from piledriver.runtime.world import World

_ROWS_AT_ONCE = 512


class Scorer(Protocol):
    """Computes negative log-likelihoods of tokens, in nats."""

    length: int
    """The longest window, in tokens."""
    vocab_size: int
    """Token ids that the model knows: one more than the largest."""
    device: torch.device

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each target given the inputs up to it, [batch, time] in fp32; 0 where it is -100."""

    def losses_and_matches(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses, and whether each target is the most likely token; true where it is -100."""

    def greedy(self, ids: Sequence[int], new_tokens: int, is_done: Callable[[list[int]], bool]) -> list[int]:
        """Return the greedy continuation of `ids`: at most `new_tokens`, or until `is_done` of those so far."""

    def share(self, world: World) -> tuple[int, int]:
        """Return which share of the documents this rank scores, and of how many."""

    def idle(self) -> bool:
        """Without a batch of its own, take part in one forward pass of the other ranks; return whether there was one.

        Ranks of a sharded model compute together, so a rank that has scored its share calls this until it is false.
        """


class WholeModel:
    """How a model that is whole on each rank is scored: ranks share the documents, and none waits for another."""

    def share(self, world: World) -> tuple[int, int]:
        """See `Scorer`."""
        return world.rank, world.size

    def idle(self) -> bool:
        """See `Scorer`."""
        return False


class TransformerScorer(WholeModel):
    """Our own model, whole on this rank or sharded as a `Layout` says."""

    def __init__(self, model: Transformer, length: int | None = None) -> None:
        self._model = model.eval()
        self.length = length or model.config.max_positions
        self.vocab_size = model.config.vocab_size
        state = state_of(model)
        self._mesh: Mesh | None = None if state is None or state.mesh.alone else state.mesh
        self._together = self._mesh is not None and self._mesh.layout.data_size > 1
        self.device = first_weight(model).device if state is None else torch.device(state.mesh.device_type)

    @torch.no_grad()
    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Scorer`. Ranks that share a batch (tp, cp, pp) give the same one and get the same losses."""
        rows, time = shape = tuple(inputs.shape)
        if self._together:
            shape = self._largest(shape)
            # Columns on the right are hidden by the causal mask, rows below belong to no window.
            missing = (0, shape[1] - time, 0, shape[0] - rows)
            inputs, targets = F.pad(inputs, missing), F.pad(targets, missing, value=-100)
        with eager(self._model):
            losses: Tensor = self._model(inputs, targets, reduction="none")
        return losses[:rows, :time]

    @torch.no_grad()
    def losses_and_matches(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scorer`."""
        model = self._whole("compare targets with the most likely tokens")
        hidden, _ = model.hidden(inputs)
        return _losses_and_matches(
            (model.logits(rows) for rows in torch.split(hidden.flatten(0, 1), _ROWS_AT_ONCE)), targets
        )

    def greedy(self, ids: Sequence[int], new_tokens: int, is_done: Callable[[list[int]], bool]) -> list[int]:
        """See `Scorer`."""
        model = self._whole("decode")
        return _greedy(cached_logits(model, 1, len(ids) + new_tokens), ids, new_tokens, is_done, self.device)

    def share(self, world: World) -> tuple[int, int]:
        """See `Scorer`."""
        if self._mesh is None:
            return super().share(world)
        return self._mesh.data_rank, self._mesh.layout.data_size

    def idle(self) -> bool:
        """See `Scorer`."""
        if not self._together:
            return False
        shape = self._largest((0, 0))
        if shape[0] == 0:
            return False
        tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        with torch.no_grad(), eager(self._model):
            self._model(tokens, tokens, reduction="none")
        return True

    def _largest(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The largest batch of all ranks: stages of a sharded pipeline infer what they exchange from its shape."""
        largest = torch.tensor(shape, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return tuple(largest.tolist())

    def _whole(self, action: str) -> Transformer:
        """The model, where this rank holds all of its parameters."""
        layout = None if self._mesh is None else self._mesh.layout
        if layout is not None and (layout.zero == 3 or max(layout.tp, layout.pp, layout.cp, layout.ep) > 1):
            raise UsageError(
                f"cannot {action} with a model sharded as {layout}: this rank holds a part of it",
                fix="load the published folder without a layout",
            )
        return self._model


class TransformersScorer(WholeModel):
    """A causal language model of the `transformers` library, or anything that maps `input_ids` to `.logits`."""

    def __init__(self, model: Any, length: int | None = None) -> None:
        self._model = model.eval()
        config = model.config
        known = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048
        self.length = length or int(known)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Scorer`."""
        return self.losses_and_matches(inputs, targets)[0]

    @torch.no_grad()
    def losses_and_matches(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scorer`."""
        logits = self._model(input_ids=inputs).logits.flatten(0, 1)
        return _losses_and_matches(iter(torch.split(logits, _ROWS_AT_ONCE)), targets)

    def greedy(self, ids: Sequence[int], new_tokens: int, is_done: Callable[[list[int]], bool]) -> list[int]:
        """See `Scorer`."""
        past: Any = None

        def next_logits(tokens: Tensor) -> Tensor:
            nonlocal past
            out = self._model(input_ids=tokens, past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits: Tensor = out.logits[:, -1]
            return logits

        return _greedy(next_logits, ids, new_tokens, is_done, self.device)


def _greedy(
    next_logits: NextLogits,
    ids: Sequence[int],
    new_tokens: int,
    is_done: Callable[[list[int]], bool],
    device: torch.device,
) -> list[int]:
    prompt = torch.tensor([list(ids)], device=device)
    done = decode(next_logits, prompt, new_tokens, most_likely, lambda tokens: is_done(tokens[0, len(ids) :].tolist()))
    decoded: list[int] = done[0, len(ids) :].tolist()
    return decoded


def _losses_and_matches(logits: Iterator[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce the logits of a few rows at a time: those of a whole batch in fp32 would not fit."""
    losses, matches = [], []
    for rows, goal in zip(logits, torch.split(targets.flatten(), _ROWS_AT_ONCE), strict=True):
        losses.append(F.cross_entropy(rows.float(), goal, ignore_index=-100, reduction="none"))
        matches.append((rows.argmax(dim=-1) == goal) | (goal == -100))
    return torch.cat(losses).view_as(targets), torch.cat(matches).view_as(targets)
