"""Going back: a copy of the run's state in host memory, and the list of batches that are left out for good.

Why in memory: a spike shows a few steps after the batch that caused it, while the last checkpoint is minutes old. A
snapshot every few steps costs one copy to the host and loses those few steps and batches, not minutes of both. It needs
no file: snapshots are taken at fixed steps, a run resumes only from such a step, and what was left out is in
`skipped.json` before the run acts on it, so a run that was killed leaves out the same batches.
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
    """Windows that the run leaves out, and what was seen there."""

    step: int
    """The step that the run went back to, and takes with the windows after these."""
    window: int
    """The first window that is left out."""
    windows: int
    batches: int
    seen_at: int
    """The step whose loss was wrong."""
    loss: str
    """As text: it need not be a number."""


@dataclass(frozen=True, kw_only=True)
class _Skipped:
    format: Literal["piledriver-skipped"]
    version: Literal[1]
    skipped: tuple[Skip, ...]


class SkipList:
    """The windows that a run leaves out, kept in its folder.

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
            again = "restore it from a copy, or begin in another out: without it the run would take other batches"
            tree = read_json(self._path, again=again)
            self.skips = list(checked(_Skipped, tree, self._path, again=again).skipped)

    def add(self, skip: Skip, *, write: bool = True) -> None:
        """Leave out some more windows; the file is whole before this returns."""
        self.skips.append(skip)
        if write:
            tree = {"format": "piledriver-skipped", "version": 1, "skipped": [asdict(one) for one in self.skips]}
            storage.write_text(self._path, json.dumps(tree, indent=1) + "\n")

    def after(self, window: int) -> int:
        """The first window from this one on that is not left out."""
        starts = {skip.window: skip.windows for skip in self.skips}
        while window in starts:
            window += starts[window]
        return window

    def batches_before(self, window: int) -> int:
        """How many batches were left out before this window."""
        return sum(skip.batches for skip in self.skips if skip.window < window)

    def times_from(self, step: int) -> int:
        """How often the run went back to this step."""
        return sum(skip.step == step for skip in self.skips)


class Snapshot:
    """The weights, the optimizer and whatever else has a state, as they were at one step."""

    def __init__(self, model: nn.Module, optimizer: Any, others: Sequence[Any]) -> None:
        self._model, self._optimizer, self._others = model, optimizer, others
        self._weights: dict[str, Tensor] = {}
        self._moments: dict[Tensor, dict[str, Any]] = {}
        self._states: list[Any] = []
        self.step = -1
        self.window = -1
        """The window that comes next."""

    @torch.no_grad()
    def take(self, step: int, window: int) -> None:
        """Copy everything, into the memory of the last copy where there is one."""
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
        """Put everything back, in place."""
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
    """This process's part of a tensor that is spread over several."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()
