"""Errors of saving and loading checkpoints, one class per cause."""

from __future__ import annotations

from piledriver.core.errors import CorruptFileError, PiledriverError


class CheckpointError(PiledriverError):
    """A save or a load failed on at least one rank. All ranks raise it, with the failed rank and the reason."""


class CannotSaveError(CheckpointError, OSError):
    """The folder of a save cannot be written, or its disk is full."""


def cannot_save(folder: object, error: OSError) -> CannotSaveError:
    """Return the error for an `OSError` during a save."""
    return CannotSaveError(
        f"cannot save to {folder}: {error.strerror or error}", fix="choose a writable folder with enough free space"
    )


class UnsupportedStateError(CheckpointError):
    """A `state_dict()` holds a value that cannot be written without pickle.

    A checkpoint holds tensors, arrays, numbers, strings and containers of these, so that reading one cannot run code.
    Return those from `state_dict()` and rebuild the object in `load_state_dict()`.
    """


class IncompleteCheckpointError(CorruptFileError):
    """A checkpoint is incomplete: its save was interrupted, or files are missing, truncated or damaged."""


class StateMismatchError(CheckpointError):
    """A strict load found other keys or shapes. Nothing was loaded; `strict=False` loads what matches."""


class UntrustedFileError(CheckpointError):
    """A pickle names code that weights never need. It was not run."""
