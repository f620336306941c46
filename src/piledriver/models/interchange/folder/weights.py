"""Read the weights of a checkpoint folder as our parameters, or find where they are stored."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piledriver.models.config import ModelConfig
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.families import family_of
from piledriver.models.interchange.folder.files import open_tensors, tensor_files
from piledriver.models.interchange.folder.names import meta_parameters, stored_name, tensor_rule
from piledriver.models.interchange.quantised_layers import StoredTensors
from piledriver.models.interchange.tensors import OPERATIONS, Operation


def read_weights(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    theirs: Mapping[str, Any],
    names: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor) of every parameter, or of `names` only; `theirs` is the content of its config.json.

    Missing or unknown tensors raise `InterchangeError`.
    """
    for name, operation, parts in read_parts(folder, config, theirs, names):
        yield name, operation.read(parts, config)


def read_parts(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    theirs: Mapping[str, Any],
    names: Container[str] | None = None,
    *,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Operation, list[Tensor]]]:
    """Yield (our name, operation, its tensors) as `read_weights`: not put together, and moved to `device` if given."""
    kind, files = family_of(theirs), tensor_files(Path(folder))
    unread = set(files)
    with ExitStack() as stack:
        handles = {path: stack.enter_context(open_tensors(path)) for path in sorted(set(files.values()))}
        tensors = StoredTensors(theirs, set(files), lambda stored: handles[files[stored]].get_tensor(stored))
        shapes = meta_parameters(config)
        for name in shapes:
            operation, sources = tensor_rule(kind, name, config)
            parts = []
            for source in sources:
                found = stored_name(tensors, kind, source, folder)
                unread.difference_update(tensors.parts(found))
                if names is None or name in names:
                    parts.append(tensors.dense(found).to(device=device))
            if parts:
                _check_shapes(folder, sources, parts, OPERATIONS[operation].write(shapes[name], config))
                yield name, OPERATIONS[operation], parts
    allowed = [pattern.replace("{layers}", str(config.layers)) for pattern in kind.ignore]
    allowed += [re.escape(kind.weights["head.weight"][1])] if config.tied else []
    left = sorted(key for key in unread if not any(re.search(pattern, key) for pattern in allowed))
    if left:
        raise InterchangeError(
            f"{os.fspath(folder)} holds {len(left)} tensors that are not in a {kind.name} model of its config, "
            f"first {left[0]}",
            fix="check its config.json",
        )


def stored_parts(
    folder: str | os.PathLike[str], config: ModelConfig, theirs: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[list[Tensor]], Tensor] | None, list[tuple[str, str]]]]:
    """Yield (our name, conversion, [(file, their name)]) of every parameter: where its weight is, without reading it.

    The conversion makes our tensor of theirs; None where they are the same. A quantised folder has no such parts.
    """
    if theirs.get("quantization_config"):
        raise InterchangeError(
            f"{os.fspath(folder)} is quantised: its weights have no single place in the files",
            fix="load it whole with load_folder",
        )
    kind, files = family_of(theirs), tensor_files(Path(folder))
    tensors = StoredTensors(theirs, set(files), lambda stored: torch.empty(0))
    for name in meta_parameters(config):
        operation, sources = tensor_rule(kind, name, config)
        found = [stored_name(tensors, kind, source, folder) for source in sources]
        make = None if operation == "copy" else partial(_read_parts, operation, config)
        yield name, make, [(files[stored], stored) for stored in found]


def _read_parts(operation: str, config: ModelConfig, parts: list[Tensor]) -> Tensor:
    return OPERATIONS[operation].read(parts, config)


def _check_shapes(folder: str | os.PathLike[str], names: list[str], found: list[Tensor], wanted: list[Tensor]) -> None:
    for name, tensor, like in zip(names, found, wanted, strict=True):
        if tensor.shape != like.shape:
            raise InterchangeError(
                f"{os.fspath(folder)}: {name} is {tuple(tensor.shape)}, but config.json implies {tuple(like.shape)}",
                fix="check the config.json of the folder",
            )
