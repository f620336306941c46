"""A checkpoint in another format: ours, safetensors, torch's DCP, or one `torch.save` file."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from piledriver.checkpoint import folders
from piledriver.checkpoint.errors import CheckpointError
from piledriver.checkpoint.formats.huggingface import weights_of
from piledriver.checkpoint.formats.merge import merge
from piledriver.checkpoint.loading.model import open_snapshot
from piledriver.checkpoint.saving import commit, planning
from piledriver.checkpoint.saving.group import Ranks
from piledriver.checkpoint.snapshot import Snapshot
from piledriver.checkpoint.tensor_index import read_whole
from piledriver.checkpoint.tree import from_inline, rebuild, tensor_keys
from piledriver.core.errors import UnknownNameError
from piledriver.core.storage import Location, atomic_write

FORMATS = ("piledriver", "safetensors", "dcp", "torch")


def convert(source: Location, target: Location, to: str = "piledriver", **options: Any) -> Path:
    """Convert any folder or file that `load` or `load_model` reads; the whole state is in memory meanwhile.

    `piledriver` and `torch` keep everything that is there (optimizers and so on), `safetensors` and `dcp` the tensors.
    """
    if to not in FORMATS:
        raise UnknownNameError("checkpoint format", to, FORMATS)
    path, out = folders.meant(source), folders.local(target)
    if path.resolve() == out.resolve():
        raise CheckpointError(f"{path} cannot be converted onto itself", fix="choose another target")
    if to == "safetensors":
        merge(path, out, **options)
        return out
    snapshot = open_snapshot(path, 0) if path.is_dir() and folders.is_good(path) else weights_of(path)
    tensors = {key: read_whole(snapshot.catalog, key) for key in snapshot.catalog}
    {"piledriver": _to_ours, "dcp": _to_dcp, "torch": _to_torch}[to](snapshot, tensors, out)
    return out


def _to_ours(snapshot: Snapshot, tensors: dict[str, torch.Tensor], out: Path) -> None:
    ranks = Ranks()
    plan = planning.agree(tensors, ranks)
    summary = {
        kind: [{"tensors": len(set(tensor_keys(state)))} for state in states]
        for kind, states in snapshot.shared.items()
    }
    job = commit.Job(
        folder=out,
        tensors=[(key, tensors[key]) for key, _ in plan.mine],
        index=plan.index,
        shared=json.dumps(snapshot.shared),
        own=json.dumps(dict(snapshot.own)),
        about={
            "step": snapshot.step,
            "layout": snapshot.layout,
            "extra": dict(snapshot.extra),
            "contents": summary | {"own": sorted(snapshot.own)},
        },
    )
    commit.run(job, ranks)


def _to_dcp(_: Snapshot, tensors: dict[str, torch.Tensor], out: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if out.exists():
        raise CheckpointError(f"{out} exists already", fix="choose another target, DCP does not replace one atomically")
    partial = out.with_name(f".{out.name}.partial")
    with warnings.catch_warnings():
        # It warns that there is only one process, which is what a conversion is.
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process.*")
        save(dict(tensors), storage_writer=FileSystemWriter(partial, sync_files=True), no_dist=True)
    os.rename(partial, out)


def _to_torch(snapshot: Snapshot, tensors: dict[str, torch.Tensor], out: Path) -> None:
    state: dict[str, Any] = {
        kind: [rebuild(item, lambda found: tensors[found["key"]]) for item in items]
        for kind, items in snapshot.shared.items()
    }
    state["own"] = {name: rebuild(item, from_inline) for name, item in snapshot.own.items()}
    state |= {"step": snapshot.step, "layout": snapshot.layout, "extra": dict(snapshot.extra)}
    with atomic_write(out) as file:
        torch.save(state, file)
