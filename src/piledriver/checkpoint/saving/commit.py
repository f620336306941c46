"""Write and commit a checkpoint: write, sync, rename, header. The previous one stays until the header is written."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from piledriver.checkpoint import folders
from piledriver.checkpoint.errors import CheckpointError
from piledriver.checkpoint.header import (
    DATA,
    INDEX,
    STATE,
    Header,
    file_entries,
    is_written_by_save,
    package_versions,
    utc_now,
    write_header,
)
from piledriver.checkpoint.safetensors_file import WrittenFile, write_safetensors
from piledriver.checkpoint.saving.rank_group import RankGroup
from piledriver.checkpoint.state_tree import Json, merge_state_trees
from piledriver.core.storage import fsync_folder, sha256, write_text

_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """One save with all its data in host memory, so that a thread can finish it."""

    folder: Path
    tensors: list[tuple[str, torch.Tensor]]
    """The chunks that this rank writes, by their names in its file."""
    index: dict[str, Any] | None
    """On rank 0: the place of every chunk of every tensor."""
    shared: str
    """JSON of the objects that all ranks share, as this rank has them."""
    own: str
    """JSON of the states of this rank."""
    about: Mapping[str, Any]
    """Header fields: step, layout, extra, contents."""
    total_limit: int | None = None
    alone: bool = False
    """Whether this rank saves for all: other ranks have states of their own that it does not know."""


def rank_file(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def write_and_commit(job: SaveJob, ranks: RankGroup) -> None:
    """Write the files of a save on all ranks and commit them on rank 0."""
    partial = job.folder / f"{DATA}{ranks.broadcast(secrets.token_hex(4))}{_PARTIAL}"
    try:
        # All ranks make the folder: on a network disk the one of rank 0 may not be visible yet.
        ranks.run_checked("creating the folder", lambda: partial.mkdir(parents=True, exist_ok=True))
        written = ranks.run_checked("writing", lambda: _write(job, partial, ranks.rank))
        gathered = ranks.gather((written, _differing(job.shared, ranks), job.own))
        ranks.run_checked("committing", lambda: _commit(job, partial, gathered) if ranks.first else None)
    except BaseException:
        if ranks.first:
            _discard(partial)
        raise


def _write(job: SaveJob, partial: Path, rank: int) -> WrittenFile | None:
    return write_safetensors(partial / rank_file(rank), job.tensors) if job.tensors else None


def _differing(text: str, ranks: RankGroup) -> str | None:
    """Return this rank's structure if it differs from that of rank 0, so that most ranks send nothing."""
    return None if ranks.broadcast(text if ranks.size > 1 else "") == text and not ranks.first else text


def _commit(job: SaveJob, partial: Path, gathered: list[tuple[WrittenFile | None, str | None, str]]) -> None:
    files = [written for written, _, _ in gathered if written is not None]
    for written in files:
        path = partial / written.file
        if not path.is_file() or path.stat().st_size != written.bytes:
            raise CheckpointError(
                f"{path} was written by another rank but is not visible on rank 0",
                fix="save to a folder that all nodes share",
            )
    shared: Json = {}
    for text in dict.fromkeys(text for _, text, _ in gathered if text is not None):
        shared = merge_state_trees(shared, json.loads(text))
    owned = [json.loads(text) for _, _, text in gathered]
    for name, content in (
        (STATE, {"shared": shared, **_once(owned, alone=job.alone)}),
        (INDEX, _with_files(job.index or {})),
    ):
        write_text(partial / name, json.dumps(content, separators=(",", ":")))
        files.append(WrittenFile(name, (partial / name).stat().st_size, sha256(partial / name)))
    fsync_folder(partial)
    data = partial.with_name(partial.name.removesuffix(_PARTIAL))
    partial.rename(data)
    fsync_folder(job.folder)
    fsync_folder(job.folder.parent)
    header = Header(
        data=data.name,
        files=file_entries(files),
        world_size=len(gathered),
        saved_at=utc_now(),
        versions=package_versions(),
        **job.about,
    )
    write_header(job.folder, header)
    _sweep(job.folder, keep=data.name)
    folders.remove_interrupted(job.folder)
    if job.total_limit is not None:
        folders.rotate_checkpoints(job.folder.parent, job.total_limit)


def _once(owned: list[dict[str, Json]], *, alone: bool) -> dict[str, Json]:
    """Return the states of each rank, and once those that are equal on all.

    Of a rank that saves alone these are the positions of its loaders, which do not depend on the rank.
    """
    common = {
        name: state
        for name, state in owned[0].items()
        if all(other.get(name) == state for other in owned) and (not alone or name.startswith("loaders/"))
    }
    return {
        "common": common,
        "ranks": [{name: state for name, state in own.items() if name not in common} for own in owned],
    }


def _with_files(index: dict[str, Any]) -> dict[str, Any]:
    ranks = sorted({chunk[0] for entry in index.values() for chunk in entry["chunks"]})
    return {"files": {str(rank): rank_file(rank) for rank in ranks}, "tensors": index}


def _sweep(folder: Path, keep: str) -> None:
    """Remove replaced data and the remains of interrupted saves; files that no save wrote stay."""
    for path in folder.iterdir():
        if path.name != keep and is_written_by_save(path):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _discard(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    if partial.parent.is_dir() and not any(partial.parent.iterdir()):
        partial.parent.rmdir()
