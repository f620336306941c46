"""JSON files written by this package: one that cannot be read is damaged, and the fix is to write it again."""

from __future__ import annotations

import json
import os
from typing import Any, TypeVar

from piledriver.core import storage
from piledriver.core.config import from_mapping
from piledriver.core.errors import ConfigError, CorruptFileError

C = TypeVar("C")


def read_json(location: storage.Location, *, again: str) -> dict[str, Any]:
    """Return the object in a JSON file; `again` is the fix to name if the file is damaged.

    >>> storage.write_bytes("memory://note.json", b'{"documents": 1\\xff}')
    >>> read_json("memory://note.json", again="build it again")
    Traceback (most recent call last):
    ...
    piledriver.core.errors.CorruptFileError: memory://note.json is damaged: byte 15 is not UTF-8. Fix: build it again
    """
    content = storage.read_bytes(location)
    try:
        tree = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise damaged_file(location, f"byte {error.start} is not UTF-8", again=again) from error
    except (ValueError, RecursionError) as error:
        raise damaged_file(location, str(error), again=again) from error
    if not isinstance(tree, dict):
        raise damaged_file(location, "it holds no JSON object", again=again)
    return tree


def checked(form: type[C], tree: dict[str, Any], location: storage.Location, *, again: str) -> C:
    """Return the object of a JSON file as a dataclass, with keys and types checked."""
    try:
        return from_mapping(form, tree, os.fspath(location))
    except ConfigError as error:
        why = error.what.removeprefix(f"{os.fspath(location)}: ")
        raise damaged_file(location, why, again=again) from error


def damaged_file(location: storage.Location, why: str, *, again: str) -> CorruptFileError:
    """Return the error for a damaged JSON file."""
    return CorruptFileError(f"{os.fspath(location)} is damaged: {why}", fix=again)
