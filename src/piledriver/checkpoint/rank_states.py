"""States that a rank adds to a checkpoint that rank 0 saved alone: its random generators and loaders.

Such a save has no collective, so a rank writes its states when it comes to it, before or after rank 0 commits. They
carry the `extra` of the save they belong to, and are not read with another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piledriver.checkpoint.contents import Contents, collect_own
from piledriver.checkpoint.errors import IncompleteCheckpointError
from piledriver.checkpoint.state_tree import Json
from piledriver.core.storage import read_text, write_text

_PREFIX = "rank-"


def write_rank_state(folder: Path, rank: int, contents: Contents, extra: Mapping[str, Any]) -> None:
    """Write the states of one rank beside the checkpoint that `extra` describes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(_path(folder, rank), json.dumps({"extra": dict(extra), "own": collect_own(contents)}))


def read_rank_state(folder: Path, rank: int, extra: Mapping[str, Any]) -> dict[str, Json]:
    """Return the states that a rank added to the save that `extra` describes; empty if it added none."""
    path = _path(folder, rank)
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_text(path))
        own: dict[str, Json] = found["own"] if found["extra"] == dict(extra) else {}
    except (ValueError, KeyError, TypeError) as error:
        raise IncompleteCheckpointError(f"{path} is damaged: {error}", fix="load an earlier checkpoint") from error
    return own


def is_rank_state(path: Path) -> bool:
    """Return whether `write_rank_state` wrote a file."""
    return path.name.startswith(_PREFIX) and path.suffix == ".json"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{_PREFIX}{rank:05d}.json"
