"""Roll back after a spike: snapshots of the run's state in host memory, and the list of skipped windows.

A spike shows a few steps after the batch that caused it, while the last checkpoint is minutes old. A snapshot every few
steps costs one copy to the host and loses only those steps. Snapshots need no file: they are taken at fixed steps,
checkpoints only at such steps, and `skipped.json` is written before the run acts on it, so a run that was killed skips
the same windows when it resumes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.core import storage
from piledriver.core.json_file import checked, read_json

FILE = "skipped.json"


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A range of windows that the run skips, and why."""

    step: int
    """The step that the run rolled back to; it reads the windows after the skipped ones."""
    window: int
    """The first skipped window."""
    windows: int
    batches: int
    seen_at: int
    """The step with the spike."""
    loss: str
    """Its loss as text, which may be `nan`."""


@dataclass(frozen=True, kw_only=True)
class _Skipped:
    format: Literal["piledriver-skipped"]
    version: Literal[1]
    skipped: tuple[Skip, ...]


class SkipList:
    """The windows that a run skips, kept in its folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as run:
    ...     SkipList(run).add(Skip(step=20, window=160, windows=24, batches=3, seen_at=22, loss="nan"))
    ...     skips = SkipList(run)
    >>> skips.after(160), skips.after(8), skips.batches_before(200), skips.times_from(20)
    (184, 8, 3, 1)
    """

    def __init__(self, run: storage.Location) -> None:
        self._path = storage.join(run, FILE)
        self.skips: list[Skip] = []
        if storage.exists(self._path):
            again = "restore it from a copy, or start again in another out: without it the run would read other batches"
            tree = read_json(self._path, again=again)
            self.skips = list(checked(_Skipped, tree, self._path, again=again).skipped)

    def add(self, skip: Skip, *, write: bool = True) -> None:
        """Add a range of windows and write the file atomically."""
        self.skips.append(skip)
        if write:
            tree = {"format": "piledriver-skipped", "version": 1, "skipped": [asdict(one) for one in self.skips]}
            storage.write_text(self._path, json.dumps(tree, indent=1) + "\n")

    def after(self, window: int) -> int:
        """Return the first window at or after this one that is not skipped."""
        starts = {skip.window: skip.windows for skip in self.skips}
        while window in starts:
            window += starts[window]
        return window

    def batches_before(self, window: int) -> int:
        """Return the number of batches skipped before this window."""
        return sum(skip.batches for skip in self.skips if skip.window < window)

    def times_from(self, step: int) -> int:
        """Return how often the run rolled back to this step."""
        return sum(skip.step == step for skip in self.skips)


class Snapshot:
    """A copy of weights, optimizer states and other state at one step, in host memory."""

    def __init__(self, model: nn.Module, optimizer: Any, others: Sequence[Any]) -> None:
        self._model, self._optimizer, self._others = model, optimizer, others
        self._weights: dict[str, Tensor] = {}
        self._moments: dict[Tensor, dict[str, Any]] = {}
        self._states: list[Any] = []
        self.step = -1
        self.window = -1
        """The next window to read at that step."""

    @torch.no_grad()
    def take(self, step: int, window: int) -> None:
        """Copy the state, reusing the buffers of the last snapshot."""
        self.step, self.window = step, window
        for name, tensor in self._model.state_dict().items():
            self._weights[name] = _kept(tensor, self._weights.get(name))
        state = self._optimizer.state
        self._moments = {
            parameter: {key: _kept(value, self._moments.get(parameter, {}).get(key)) for key, value in values.items()}
            for parameter, values in state.items()
        }
        self._states = [copy.deepcopy(other.state_dict()) for other in self._others]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state in place."""
        for name, tensor in self._model.state_dict().items():
            _put_back(tensor, self._weights[name])
        state = self._optimizer.state
        for parameter in list(state):
            if parameter not in self._moments:
                del state[parameter]
                continue
            for key, kept in self._moments[parameter].items():
                if isinstance(kept, Tensor):
                    _put_back(state[parameter][key], kept)
                else:
                    state[parameter][key] = copy.deepcopy(kept)
        for other, kept in zip(self._others, self._states, strict=True):
            other.load_state_dict(copy.deepcopy(kept))


def _kept(value: Any, into: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    part = _local(value)
    if isinstance(into, Tensor) and into.shape == part.shape and into.dtype == part.dtype:
        return into.copy_(part)
    return torch.empty_like(part, device="cpu").copy_(part)


def _put_back(tensor: Any, kept: Tensor) -> None:
    _local(tensor).copy_(kept)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()
