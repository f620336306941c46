"""Names of checkpoint folders: the next one, the latest good one, and which of them are too many."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from piledriver.checkpoint import accelerate_folder
from piledriver.checkpoint.header import HEADER, is_complete, is_ours
from piledriver.core.errors import UsageError
from piledriver.core.storage import Location, fsync_folder, is_remote

# `checkpoint_7` as Accelerate names them, `step-700` as our own training loop does.
_NAME = re.compile(r"(?:checkpoint_|step-)(\d+)")
_REMOVED = ".removed-"


def folder_for(root: Location, number: int, style: str = "checkpoint_{}") -> Path:
    """Where the checkpoint with that number belongs.

    >>> folder_for("run", 3).as_posix(), folder_for("run", 300, "step-{}").as_posix()
    ('run/checkpoint_3', 'run/step-300')
    """
    name = style.format(number)
    if not _NAME.fullmatch(name):
        raise UsageError(f"unknown checkpoint name {style!r}", fix="use 'checkpoint_{}' or 'step-{}'")
    return local(root) / name


def checkpoints(root: Location) -> list[Path]:
    """The finished checkpoints in a folder, oldest number first. Interrupted ones are not among them."""
    return [path for _, path in sorted(_numbered(local(root))) if is_good(path)]


def latest(root: Location) -> Path | None:
    """The finished checkpoint with the highest number, or None."""
    for _, path in sorted(_numbered(local(root)), reverse=True):
        if is_good(path):
            return path
    return None


def next_number(root: Location) -> int:
    """One more than the highest number in use, finished or not."""
    return max((number for number, _ in _numbered(local(root))), default=-1) + 1


def rotate(root: Location, total_limit: int) -> list[Path]:
    """Remove the oldest finished checkpoints until `total_limit` are left; returns what was removed.

    A folder is renamed before its files go, so that a removal that is interrupted never leaves half a checkpoint
    under a good name.
    """
    if total_limit < 1:
        raise UsageError(f"total_limit must be at least 1, got {total_limit}", fix="keep at least one checkpoint")
    root = local(root)
    for leftover in root.glob(f"{_REMOVED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    surplus = checkpoints(root)[:-total_limit]
    for path in surplus:
        moved = root / f"{_REMOVED}{path.name}"
        path.rename(moved)
        shutil.rmtree(moved, ignore_errors=True)
    if surplus:
        fsync_folder(root)
    return surplus


def sweep_interrupted(current: Path) -> None:
    """Remove the folders beside `current` in which an interrupted save left data and nobody anything else."""
    for _, path in _numbered(current.parent):
        if path != current and not (path / HEADER).exists():
            entries = list(path.iterdir())
            if entries and all(is_ours(entry) for entry in entries):
                shutil.rmtree(path, ignore_errors=True)


def is_good(folder: Path) -> bool:
    """A finished checkpoint of ours, or a folder that Accelerate wrote (those carry no mark of being finished)."""
    return is_complete(folder) or accelerate_folder.is_accelerate_folder(folder)


def meant(location: Location) -> Path:
    """What a user who names a folder means: itself, or the latest of the checkpoints in it, or in a run's folder."""
    path = local(location)
    if is_good(path):
        return path
    holds_weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    return latest(path) or (None if holds_weights else latest(path / "checkpoints")) or path


def local(location: Location) -> Path:
    """A local path; checkpoints are committed by renames, which remote stores do not have."""
    if is_remote(location):
        raise UsageError(
            f"checkpoints are written to a local or mounted folder, not to {location}",
            fix="save locally and copy the finished folder",
        )
    return Path(location)


def _numbered(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return [(int(match.group(1)), path) for match, path in found if match]
