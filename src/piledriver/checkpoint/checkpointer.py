"""Saving and loading on every rank at the same point of the program, in the foreground or behind the training."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from piledriver.checkpoint import folders
from piledriver.checkpoint.contents import Contents, own_state, shared_state
from piledriver.checkpoint.errors import CheckpointError, cannot_save
from piledriver.checkpoint.header import verify as verify_files
from piledriver.checkpoint.loading.model import KeyMap, match, open_snapshot
from piledriver.checkpoint.loading.report import LoadReport
from piledriver.checkpoint.saving import commit, planning
from piledriver.checkpoint.saving.group import Ranks
from piledriver.checkpoint.saving.staging import Stage
from piledriver.checkpoint.snapshot import Snapshot
from piledriver.checkpoint.tensor_index import name_in_file
from piledriver.checkpoint.tree import Json, tensor_keys
from piledriver.core.storage import Location


class Checkpointer:
    """Saves and loads; one per run, made at the same point on every rank.

    An asynchronous save holds the step only while tensors are copied to host memory. Its error, if any, is raised by
    the next `save`, `load`, `wait` or `close`.
    """

    def __init__(self, *, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._timeout = timeout
        self._ranks_: Ranks | None = None
        self._stage = Stage()
        self._plan: planning.SharedPlan | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        folder: Location,
        contents: Contents,
        *,
        step: int | None = None,
        layout: Any = None,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        total_limit: int | None = None,
    ) -> Path:
        """Save everything in `contents` to a folder. What was saved there before stays until the new one is whole."""
        self.wait()
        target = folders.local(folder)
        ranks = self._ranks
        shared, tensors, own = ranks.together("collecting the state", lambda: _collected(contents))
        self._plan = planning.agree(tensors, ranks, self._plan)
        pieces = [_piece(tensors[key], key, offsets) for key, offsets in self._plan.mine]
        job = commit.Job(
            folder=target,
            tensors=self._stage.copies(pieces) if asynchronous else pieces,
            index=self._plan.index,
            shared=json.dumps(shared),
            own=json.dumps(own),
            about={"step": step, "layout": layout, "extra": dict(extra or {}), "contents": _summary(shared, own)},
            total_limit=total_limit,
        )
        if not asynchronous:
            try:
                commit.run(job, ranks)
            except OSError as error:
                raise cannot_save(target, error) from error
            return target
        self._thread = threading.Thread(target=self._run, args=(job, ranks), name="checkpoint-save")
        self._thread.start()
        return target

    def load(
        self,
        folder: Location,
        contents: Contents,
        *,
        strict: bool = True,
        key_map: KeyMap | None = None,
        only: Collection[str] | None = None,
        verify: bool = True,
    ) -> LoadReport:
        """Load a checkpoint of ours or an Accelerate folder into `contents`, in place, whatever saved it.

        `only` names the kinds to load (`models`, `optimizers`, `schedulers`, `loaders`, `custom`, `scaler`, `rng`,
        `per_rank`). `key_map` renames saved model keys: a function from saved to wanted key (None leaves one out), or
        a mapping of prefixes. `verify` compares checksums first, each rank a part of the files.
        """
        self.wait()
        source = folders.local(folder)
        ranks = self._ranks

        def check() -> Snapshot:
            snapshot = open_snapshot(source, ranks.rank)
            if verify and snapshot.header is not None:
                verify_files(source, part=ranks.rank, parts=ranks.size)
            return snapshot

        snapshot = ranks.together("reading the checkpoint", check)
        matching = ranks.together(
            "matching the checkpoint", lambda: match(snapshot, contents, key_map=key_map, only=only)
        )
        # What one pipeline stage does not know, another may: only what no rank expects is unexpected.
        matching.unexpected = sorted(set.intersection(*map(set, ranks.shared(matching.unexpected))))
        if strict:
            ranks.together("matching the checkpoint", matching.report().raise_unless_exact)
        return ranks.together("loading", matching.run)

    @property
    def pending(self) -> bool:
        """Whether an asynchronous save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the asynchronous save is committed; raise what went wrong in it."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise CheckpointError(f"the save is not finished after {timeout} s", fix="wait longer")
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the asynchronous save failed: {error}") from error

    def close(self) -> None:
        """Finish what is pending and give the process group back."""
        try:
            self.wait()
        finally:
            if self._ranks_ is not None:
                self._ranks_.close()
                self._ranks_ = None

    @property
    def _ranks(self) -> Ranks:
        if self._ranks_ is None:
            self._ranks_ = Ranks(self._timeout)
        return self._ranks_

    def _run(self, job: commit.Job, ranks: Ranks) -> None:
        try:
            commit.run(job, ranks)
        except BaseException as error:
            self._error = error


def save(folder: Location, contents: Contents, **options: Any) -> Path:
    """`Checkpointer.save` once, in the foreground. A training loop keeps a `Checkpointer` instead."""
    saver = Checkpointer()
    try:
        return saver.save(folder, contents, **options)
    finally:
        saver.close()


def load(folder: Location, contents: Contents, **options: Any) -> LoadReport:
    """`Checkpointer.load` once.

    >>> import tempfile; from torch import nn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(folder, Contents(models=[nn.Linear(2, 3)]), step=7)
    ...     report = load(folder, Contents(models=[nn.Linear(2, 3)]))
    >>> report.step, report.matched
    (7, ('models/0/bias', 'models/0/weight', 'rng'))
    """
    loader = Checkpointer()
    try:
        return loader.load(folder, contents, **options)
    finally:
        loader.close()


def _collected(contents: Contents) -> tuple[dict[str, list[Json]], dict[str, torch.Tensor], dict[str, Json]]:
    shared, tensors = shared_state(contents)
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"{key} is on the meta device and has no values", fix="materialise the model first")
    return shared, tensors, own_state(contents)


def _piece(tensor: torch.Tensor, key: str, offsets: tuple[int, ...]) -> tuple[str, torch.Tensor]:
    data = planning.local_part(tensor)
    return name_in_file(key, offsets, whole=data.shape == tensor.shape), data


def _summary(shared: Mapping[str, list[Json]], own: Mapping[str, Json]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        kind: [{"tensors": len(set(tensor_keys(state)))} for state in states] for kind, states in shared.items()
    }
    return summary | {"own": sorted(own)}
