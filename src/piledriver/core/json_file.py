"""JSON files that we wrote ourselves: one that cannot be read is damaged, and is made again rather than edited."""

from __future__ import annotations

import json
import os
from typing import Any, TypeVar

from piledriver.core import storage
from piledriver.core.config import from_mapping
from piledriver.core.errors import ConfigError, CorruptFileError

C = TypeVar("C")


def read_json(location: storage.Location, *, again: str) -> dict[str, Any]:
    """The object in a JSON file of ours; `again` says what a user does where it is damaged.

    >>> storage.write_bytes("memory://note.json", b'{"documents": 1\\xff}')
    >>> read_json("memory://note.json", again="run the build again")
    Traceback (most recent call last):
    ...
    piledriver.core.errors.CorruptFileError: memory://note.json is damaged: byte 15 is no text. Fix: run the build again
    """
    content = storage.read_bytes(location)
    try:
        tree = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise damaged(location, f"byte {error.start} is no text", again=again) from error
    except (ValueError, RecursionError) as error:
        raise damaged(location, str(error), again=again) from error
    if not isinstance(tree, dict):
        raise damaged(location, "it holds no JSON object", again=again)
    return tree


def checked(form: type[C], tree: dict[str, Any], location: storage.Location, *, again: str) -> C:
    """What was read as a dataclass, its keys and types compared with what we write."""
    try:
        return from_mapping(form, tree, os.fspath(location))
    except ConfigError as error:
        why = error.what.removeprefix(f"{os.fspath(location)}: ")
        raise damaged(location, why, again=again) from error


def damaged(location: storage.Location, why: str, *, again: str) -> CorruptFileError:
    """The error to raise for such a file."""
    return CorruptFileError(f"{os.fspath(location)} is damaged: {why}", fix=again)
