"""What can go wrong with a checkpoint, one class per cause."""

from __future__ import annotations

from piledriver.core.errors import CorruptFileError, PiledriverError


class CheckpointError(PiledriverError):
    """A save or a load failed on at least one rank. Every rank raises it, with the rank that failed and why."""


class CannotSaveError(CheckpointError, OSError):
    """The folder of a save cannot be written to, or its disk is full."""


def cannot_save(folder: object, error: OSError) -> CannotSaveError:
    """The system's reason in one line."""
    return CannotSaveError(
        f"cannot save to {folder}: {error.strerror or error}", fix="choose a folder that can be written to and has room"
    )


class UnsupportedStateError(CheckpointError):
    """A `state_dict()` holds a value that cannot be written without pickle.

    A checkpoint holds tensors, arrays, numbers, text and containers of these, so that reading one can never run code.
    Return those from `state_dict()` and rebuild the object in `load_state_dict()`.
    """


class IncompleteCheckpointError(CorruptFileError):
    """A folder holds no finished checkpoint: its save was interrupted, or files are missing or damaged."""


class StateMismatchError(CheckpointError):
    """A strict load found keys or shapes that differ. Nothing was loaded; `strict=False` loads what fits."""


class UntrustedFileError(CheckpointError):
    """A pickle asks for code that reading weights never needs. It was not run."""
