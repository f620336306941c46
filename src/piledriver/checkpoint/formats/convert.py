"""Convert a checkpoint to another format: piledriver's, safetensors, torch's DCP, or one `torch.save` file."""

from __future__ import annotations

import datetime
import json
import os
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from piledriver.checkpoint import folders
from piledriver.checkpoint.errors import CheckpointError
from piledriver.checkpoint.formats.merge import merge
from piledriver.checkpoint.formats.open import open_any
from piledriver.checkpoint.header import verified
from piledriver.checkpoint.opened_checkpoint import OpenedCheckpoint
from piledriver.checkpoint.saving import commit, planning
from piledriver.checkpoint.saving.rank_group import RankGroup
from piledriver.checkpoint.state_tree import rebuild_state, summary, tensor_from_inline
from piledriver.checkpoint.tensor_index import read_tensor
from piledriver.core.errors import UnknownNameError
from piledriver.core.storage import Location, atomic_write

FORMATS = ("piledriver", "safetensors", "dcp", "torch")


def convert(source: Location, target: Location, to: str = "piledriver", **options: Any) -> Path:
    """Convert any folder or file that `load` or `load_model` reads, with the whole state in memory.

    `piledriver` and `torch` keep everything (optimizers and so on), `safetensors` and `dcp` the tensors only. In a
    torch file arrays become tensors and sets lists, for `torch.load(weights_only=True)`. `load_model` reads every one.
    """
    if to not in FORMATS:
        raise UnknownNameError("checkpoint format", to, FORMATS)
    path, out = verified(folders.resolve_checkpoint(source)), folders.local_path(target)
    if path.resolve() == out.resolve():
        raise CheckpointError(f"{path} is both source and target", fix="choose another target")
    if to == "safetensors":
        merge(path, out, **options)
        return out
    opened = open_any(path)
    tensors = {key: read_tensor(opened.index, key) for key in opened.index}
    {"piledriver": _to_piledriver, "dcp": _to_dcp, "torch": _to_torch}[to](opened, tensors, out)
    return out


def _to_piledriver(opened: OpenedCheckpoint, tensors: dict[str, torch.Tensor], out: Path) -> None:
    ranks = RankGroup()
    plan = planning.plan_save(tensors, ranks)
    job = commit.SaveJob(
        folder=out,
        tensors=[(key, tensors[key]) for key, _ in plan.chunks],
        index=plan.index,
        shared=json.dumps(opened.shared),
        own=json.dumps(dict(opened.own)),
        about={
            "step": opened.step,
            "layout": opened.layout,
            "extra": dict(opened.extra),
            "contents": summary(opened.shared, opened.own),
        },
    )
    commit.write_and_commit(job, ranks)


def _to_dcp(_: OpenedCheckpoint, tensors: dict[str, torch.Tensor], out: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if out.exists():
        raise CheckpointError(f"{out} exists already", fix="choose another target, DCP does not replace one atomically")
    partial = out.with_name(f".{out.name}.partial")
    with warnings.catch_warnings():
        # DCP warns of a single process, which is intended here.
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process.*")
        save(dict(tensors), storage_writer=FileSystemWriter(partial, sync_files=True), no_dist=True)
    os.rename(partial, out)


def _to_torch(opened: OpenedCheckpoint, tensors: dict[str, torch.Tensor], out: Path) -> None:
    state: dict[str, Any] = {
        kind: [rebuild_state(item, lambda found: tensors[found["key"]]) for item in items]
        for kind, items in opened.shared.items()
    }
    state["own"] = {name: rebuild_state(item, tensor_from_inline) for name, item in opened.own.items()}
    state |= {"step": opened.step, "layout": opened.layout, "extra": dict(opened.extra)}
    with atomic_write(out) as file:
        torch.save(_plain(state), file)


def _plain(value: Any) -> Any:
    """Return a state of tensors, containers, numbers and text only, which `torch.load(weights_only=True)` accepts."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64) if value.dtype == np.uint64 else value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, torch.Size | torch.Tensor):
        return value
    if isinstance(value, list | range | deque | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return str(value) if isinstance(value, PurePath | datetime.datetime) else value
