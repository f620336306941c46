"""piledriver: build a corpus, train a language model on any number of devices, measure its bits per byte.

`__all__` lists the nouns of this library. The names of Hugging Face Accelerate can be imported from here too, so that a
loop written for it needs another import line only; `piledriver.compat.accelerate` has all of them under their module
paths. Names are imported on first use: `import piledriver` imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piledriver.accelerator import Accelerator
    from piledriver.corpus import Document, Recipe, build_corpus
    from piledriver.data import TokenStream
    from piledriver.engine import Layout
    from piledriver.evaluate import bits_per_byte
    from piledriver.models import Transformer
    from piledriver.runtime import World
    from piledriver.serve import generate
    from piledriver.train import TrainConfig, train

    __version__: str

__all__ = [
    "Accelerator",
    "Document",
    "Layout",
    "Recipe",
    "TokenStream",
    "TrainConfig",
    "Transformer",
    "World",
    "__version__",
    "bits_per_byte",
    "build_corpus",
    "generate",
    "train",
]

_ROOMS = {
    "Accelerator": "piledriver.accelerator",
    "Document": "piledriver.corpus",
    "Layout": "piledriver.engine",
    "Recipe": "piledriver.corpus",
    "TokenStream": "piledriver.data",
    "TrainConfig": "piledriver.train",
    "Transformer": "piledriver.models",
    "World": "piledriver.runtime",
    "bits_per_byte": "piledriver.evaluate",
    "build_corpus": "piledriver.corpus",
    "generate": "piledriver.serve",
    # Importable, not listed: what a loop imports beside the nouns, under Accelerate's names.
    "ProjectConfiguration": "piledriver.accelerator",
    "TorchDynamoPlugin": "piledriver.accelerator",
    "detect_world": "piledriver.runtime",
    "get_logger": "piledriver.accelerator",
    "release_memory": "piledriver.accelerator",
    "set_seed": "piledriver.compat.accelerate.utils",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(_ROOMS[name]), name)
    if name == "train":  # a package that can be called: see piledriver.train
        return importlib.import_module("piledriver.train")
    if name == "__version__":
        from importlib import metadata

        return metadata.version("piledriver")
    if not name.startswith("_"):
        accelerate = importlib.import_module("piledriver.compat.accelerate")
        if name in accelerate.__all__:
            return getattr(accelerate, name)
    raise AttributeError(f"module 'piledriver' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
