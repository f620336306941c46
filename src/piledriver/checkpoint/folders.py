"""Checkpoint folders of a run: names, the latest complete one, rotation."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from piledriver.checkpoint.folder_kinds import is_accelerate_folder
from piledriver.checkpoint.header import DATA, HEADER, is_complete, is_written_by_save, require_complete
from piledriver.checkpoint.rank_states import is_rank_state
from piledriver.core.errors import MissingFileError, UsageError
from piledriver.core.storage import Location, fsync_folder, is_remote

# `checkpoint_7` as Accelerate names them, `step-700` as `piledriver train` does.
_NAME = re.compile(r"(?:checkpoint_|step-)(\d+)")
_REMOVED = ".removed-"


def folder_for(root: Location, number: int, style: str = "checkpoint_{}") -> Path:
    """Return the folder of the checkpoint with a number.

    >>> folder_for("run", 3).as_posix(), folder_for("run", 300, "step-{}").as_posix()
    ('run/checkpoint_3', 'run/step-300')
    """
    name = style.format(number)
    if not _NAME.fullmatch(name):
        raise UsageError(f"unknown checkpoint name {style!r}", fix="use 'checkpoint_{}' or 'step-{}'")
    return local_path(root) / name


def checkpoints(root: Location) -> list[Path]:
    """Return the complete checkpoints in a folder, lowest number first."""
    return [path for _, path in sorted(_numbered(local_path(root))) if is_loadable(path)]


def latest(root: Location) -> Path | None:
    """Return the complete checkpoint with the highest number, or None."""
    for _, path in sorted(_numbered(local_path(root)), reverse=True):
        if is_loadable(path):
            return path
    return None


def next_number(root: Location) -> int:
    """Return the highest number in use, complete or not, plus one."""
    return max((number for number, _ in _numbered(local_path(root))), default=-1) + 1


def rotate_checkpoints(root: Location, total_limit: int) -> list[Path]:
    """Remove the oldest complete checkpoints until `total_limit` are left; return what was removed.

    A folder is renamed before its files are removed, so that an interrupted removal never leaves an incomplete
    checkpoint under a valid name.
    """
    if total_limit < 1:
        raise UsageError(f"total_limit must be at least 1, got {total_limit}", fix="keep at least one checkpoint")
    root = local_path(root)
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


def remove_interrupted(current: Path) -> None:
    """Remove the folders beside `current` that hold nothing but the data of an interrupted save."""
    for _, path in _numbered(current.parent):
        if path != current and not (path / HEADER).exists():
            entries = list(path.iterdir())
            if entries and all(is_written_by_save(entry) or is_rank_state(entry) for entry in entries):
                shutil.rmtree(path, ignore_errors=True)


def is_loadable(folder: Path) -> bool:
    """Return whether a folder is a complete checkpoint, or was written by Accelerate (which marks none complete)."""
    return is_complete(folder) or is_accelerate_folder(folder)


def resolve_checkpoint(location: Location) -> Path:
    """Return the checkpoint, weights folder or file that a path names: itself, or the latest checkpoint of a run.

    A path with nothing but incomplete checkpoints is an error that says what is wrong with the latest of them.
    """
    path = local_path(location)
    if not path.exists():
        raise MissingFileError(path)
    if path.is_file() or is_loadable(path):
        return path
    holds_weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    found = latest(path) or (None if holds_weights else latest(path / "checkpoints"))
    if found is not None or holds_weights:
        return found or path
    for _, folder in [(0, path), *sorted(_numbered(path) + _numbered(path / "checkpoints"), reverse=True)]:
        if (folder / HEADER).exists() or any(folder.glob(f"{DATA}*")):
            require_complete(folder)
    return path


def local_path(location: Location) -> Path:
    """Return a local path; checkpoints are committed by renames, which remote stores lack."""
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
