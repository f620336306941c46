"""Files of `torch.save`, read without running what they name.

`load_torch_file` is torch's `weights_only` reader with the few NumPy names that random states need. `load_attributes`
reads a whole pickled object (Accelerate pickles a sampler) with every class reduced to its attributes.
"""

from __future__ import annotations

import _codecs
import importlib
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from piledriver.checkpoint.errors import UntrustedFileError
from piledriver.core.errors import CorruptFileError
from piledriver.core.safe_pickle import DAMAGED_PICKLE, load_inert

_DTYPES = ("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64")


def load_torch_file(path: Path) -> Any:
    """Return the tensors, containers, numbers and NumPy arrays of a `torch.save` file; reject any other content."""
    multiarray: Any = importlib.import_module("numpy._core.multiarray")
    allowed: list[Any] = [np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar]
    allowed += [getattr(np.dtypes, f"{name}DType") for name in _DTYPES]
    # NumPy's pickles of raw bytes name codecs.encode, which only turns text into bytes.
    allowed += [_codecs.encode]
    # Files from NumPy 1 name the same function by its old path.
    renamed = (multiarray._reconstruct, "numpy.core.multiarray._reconstruct")
    try:
        with torch.serialization.safe_globals([*allowed, renamed]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).splitlines()[0])
        raise UntrustedFileError(
            f"{path} was not read: it holds more than tensors and plain values: {reason.strip()}",
            fix="save it again as safetensors, or convert it yourself if you trust it",
        ) from error
    except (EOFError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), "it is empty or truncated")
        raise CorruptFileError(
            f"{path} is damaged, or no file of torch.save: {reason}", fix="copy or download it again"
        ) from error


def load_attributes(path: Path) -> dict[str, Any]:
    """Return the plain attributes (numbers and text) of the object in a `torch.save` file."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
            found = load_inert(io.BytesIO(archive.read(name)))
    except (zipfile.BadZipFile, StopIteration, *DAMAGED_PICKLE) as error:
        raise UntrustedFileError(f"{path} cannot be read without running it: {error}") from error
    fields = found if isinstance(found, dict) else vars(found)
    return {key: value for key, value in fields.items() if isinstance(value, int | float | str | bool | None)}
