"""From copied tensors to a finished checkpoint: write, sync, rename, mark. Until the mark, nothing old is touched."""

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
    is_ours,
    now,
    versions_here,
    write_header,
)
from piledriver.checkpoint.safetensors_file import Written, write_file
from piledriver.checkpoint.saving.group import Ranks
from piledriver.checkpoint.tree import Json, merged
from piledriver.core.storage import fsync_folder, sha256, write_text

_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save, with everything in host memory that it needs to finish on its own."""

    folder: Path
    tensors: list[tuple[str, torch.Tensor]]
    """This rank's pieces, by their names in its file."""
    index: dict[str, Any] | None
    """On the first rank: where every piece of every tensor will be."""
    shared: str
    """The JSON of the structure that all ranks own together, as this rank sees it."""
    own: str
    """The JSON of what belongs to this rank alone."""
    about: Mapping[str, Any]
    """Header fields: step, layout, extra, contents."""
    total_limit: int | None = None


def file_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def run(job: Job, ranks: Ranks) -> None:
    """Write the job's files on every rank and commit them on the first."""
    partial = job.folder / f"{DATA}{ranks.told(secrets.token_hex(4))}{_PARTIAL}"
    try:
        # Every rank makes the folder: the first one's may not be visible yet on a network disk.
        ranks.together("making the folder", lambda: partial.mkdir(parents=True, exist_ok=True))
        written = ranks.together("writing", lambda: _write(job, partial, ranks.rank))
        gathered = ranks.gathered((written, _differing(job.shared, ranks), job.own))
        ranks.together("committing", lambda: _commit(job, partial, gathered) if ranks.first else None)
    except BaseException:
        if ranks.first:
            _discard(partial)
        raise


def _write(job: Job, partial: Path, rank: int) -> Written | None:
    return write_file(partial / file_of(rank), job.tensors) if job.tensors else None


def _differing(text: str, ranks: Ranks) -> str | None:
    """This rank's structure where it is not the first rank's: most ranks have nothing to send."""
    return None if ranks.told(text if ranks.size > 1 else "") == text and not ranks.first else text


def _commit(job: Job, partial: Path, gathered: list[tuple[Written | None, str | None, str]]) -> None:
    files = [written for written, _, _ in gathered if written is not None]
    for written in files:
        path = partial / written.file
        if not path.is_file() or path.stat().st_size != written.bytes:
            raise CheckpointError(
                f"{path} was written by another rank but is not visible here",
                fix="save to a folder that all nodes share",
            )
    shared: Json = {}
    for text in dict.fromkeys(text for _, text, _ in gathered if text is not None):
        shared = merged(shared, json.loads(text))
    owned = [json.loads(text) for _, _, text in gathered]
    for name, content in ((STATE, {"shared": shared, **_once(owned)}), (INDEX, _with_files(job.index or {}))):
        write_text(partial / name, json.dumps(content, separators=(",", ":")))
        files.append(Written(name, (partial / name).stat().st_size, sha256(partial / name)))
    fsync_folder(partial)
    data = partial.with_name(partial.name.removesuffix(_PARTIAL))
    partial.rename(data)
    fsync_folder(job.folder)
    fsync_folder(job.folder.parent)
    header = Header(
        data=data.name,
        files=file_entries(files),
        world_size=len(gathered),
        saved_at=now(),
        versions=versions_here(),
        **job.about,
    )
    write_header(job.folder, header)
    _sweep(job.folder, keep=data.name)
    folders.sweep_interrupted(job.folder)
    if job.total_limit is not None:
        folders.rotate(job.folder.parent, job.total_limit)


def _once(owned: list[dict[str, Json]]) -> dict[str, Json]:
    """Each rank's own states; what is the same everywhere once."""
    common = {name: state for name, state in owned[0].items() if all(other.get(name) == state for other in owned)}
    return {
        "common": common,
        "ranks": [{name: state for name, state in own.items() if name not in common} for own in owned],
    }


def _with_files(index: dict[str, Any]) -> dict[str, Any]:
    ranks = sorted({chunk[0] for entry in index.values() for chunk in entry["chunks"]})
    return {"files": {str(rank): file_of(rank) for rank in ranks}, "tensors": index}


def _sweep(folder: Path, keep: str) -> None:
    """Remove what the new data replaces, and what interrupted saves left; other people's files stay."""
    for path in folder.iterdir():
        if path.name != keep and is_ours(path):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _discard(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    if partial.parent.is_dir() and not any(partial.parent.iterdir()):
        partial.parent.rmdir()
