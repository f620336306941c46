"""Save and load checkpoints on all ranks, in the foreground or asynchronously."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from piledriver.checkpoint import folders
from piledriver.checkpoint.contents import Contents, collect_own, collect_shared
from piledriver.checkpoint.errors import CheckpointError, cannot_save
from piledriver.checkpoint.formats.open import open_folder
from piledriver.checkpoint.header import verify as verify_files
from piledriver.checkpoint.loading.match import KeyMap, load_matching
from piledriver.checkpoint.loading.report import LoadReport
from piledriver.checkpoint.opened_checkpoint import OpenedCheckpoint
from piledriver.checkpoint.saving import commit, planning
from piledriver.checkpoint.saving.rank_group import RankGroup
from piledriver.checkpoint.saving.staging import HostStaging
from piledriver.checkpoint.state_tree import Json, summary
from piledriver.checkpoint.tensor_index import chunk_name
from piledriver.core.storage import Location


class Checkpointer:
    """Saves and loads checkpoints; one per run, created at the same point on all ranks.

    An asynchronous save blocks only while tensors are copied to host memory. Its error, if any, is raised by the next
    `save`, `load`, `wait` or `close`.
    """

    def __init__(self, *, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._timeout = timeout
        self._rank_group: RankGroup | None = None
        self._staging = HostStaging()
        self._plan: planning.GlobalPlan | None = None
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
        alone: bool = False,
    ) -> Path:
        """Save `contents` to a folder. A checkpoint that is already there stays until the new one is complete.

        All ranks call this. With `alone` one rank saves what is replicated on all, and no other takes part; these may
        add their own states by `rank_states.write_rank_state`.
        """
        self.wait()
        target = folders.local_path(folder)
        ranks = RankGroup(alone=True) if alone else self._ranks
        shared, tensors, own = ranks.run_checked("collecting the state", lambda: _collected(contents))
        plan = planning.plan_save(tensors, ranks, None if alone else self._plan)
        if not alone:
            self._plan = plan
        chunks = [_named_chunk(tensors[key], key, offsets) for key, offsets in plan.chunks]
        job = commit.SaveJob(
            folder=target,
            tensors=self._staging.copies(chunks) if asynchronous else chunks,
            index=plan.index,
            shared=json.dumps(shared),
            own=json.dumps(own),
            about={"step": step, "layout": layout, "extra": dict(extra or {}), "contents": summary(shared, own)},
            total_limit=total_limit,
            alone=alone,
        )
        if not asynchronous:
            try:
                commit.write_and_commit(job, ranks)
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
        """Load a checkpoint or an Accelerate folder into `contents`, in place, from any number of ranks and any layout.

        `only` names the kinds to load (`models`, `optimizers`, `schedulers`, `loaders`, `custom`, `scaler`, `rng`,
        `per_rank`). `key_map` renames saved model keys: a function from saved to wanted key (None skips one), or a
        mapping of prefixes. `verify` compares checksums first, each rank those of a part of the files.
        """
        self.wait()
        source = folders.local_path(folder)
        ranks = self._ranks

        def open_verified() -> OpenedCheckpoint:
            opened = open_folder(source, ranks.rank)
            if verify and opened.header is not None:
                verify_files(source, part=ranks.rank, parts=ranks.size)
            return opened

        opened = ranks.run_checked("reading the checkpoint", open_verified)
        return load_matching(opened, contents, ranks, strict=strict, key_map=key_map, only=only)

    @property
    def pending(self) -> bool:
        """Return whether an asynchronous save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the asynchronous save is committed; raise its error, if any."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise CheckpointError(f"the asynchronous save is not finished after {timeout} s", fix="wait longer")
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the asynchronous save failed: {error}") from error

    def close(self) -> None:
        """Wait for a pending save and destroy the process group."""
        try:
            self.wait()
        finally:
            if self._rank_group is not None:
                self._rank_group.close()
                self._rank_group = None

    @property
    def _ranks(self) -> RankGroup:
        if self._rank_group is None:
            self._rank_group = RankGroup(self._timeout)
        return self._rank_group

    def _run(self, job: commit.SaveJob, ranks: RankGroup) -> None:
        try:
            commit.write_and_commit(job, ranks)
        except BaseException as error:
            self._error = error


def save(folder: Location, contents: Contents, **options: Any) -> Path:
    """Save once, by `Checkpointer.save`. A training loop keeps a `Checkpointer` instead."""
    saver = Checkpointer()
    try:
        return saver.save(folder, contents, **options)
    finally:
        saver.close()


def load(folder: Location, contents: Contents, **options: Any) -> LoadReport:
    """Load once, by `Checkpointer.load`.

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
    shared, tensors = collect_shared(contents)
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"{key} is on the meta device and has no values", fix="materialise the model before saving"
            )
    return shared, tensors, collect_own(contents)


def _named_chunk(tensor: torch.Tensor, key: str, offsets: tuple[int, ...]) -> tuple[str, torch.Tensor]:
    data = planning.local_shard(tensor)
    return chunk_name(key, offsets, whole=data.shape == tensor.shape), data
