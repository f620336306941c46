"""A model to score from a folder: one that we trained, or one of `transformers`."""

from __future__ import annotations

import os
from typing import Any

import torch

from piledriver.core import storage
from piledriver.core.errors import MissingDependencyError, StorageError
from piledriver.data.tokenizer import Tokenizer, open_tokenizer
from piledriver.evaluate.scorers import Scorer, TransformerScorer, TransformersScorer
from piledriver.models.interchange import InterchangeError, load_folder


def open_scorer(folder: storage.Location, *, length: int | None = None, device: torch.device | None = None) -> Scorer:
    """A scorer for a checkpoint folder with `config.json` and safetensors.

    Families that we know run as our own model; any other causal model runs through `transformers`.
    """
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise StorageError(
            f"{folder} has no config.json", fix="give a run's 'model' folder or a transformers checkpoint"
        )
    device = device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return TransformerScorer(load_folder(folder).to(device), length)
    except InterchangeError:
        return TransformersScorer(_transformers_model(folder).to(device), length)


def _transformers_model(folder: storage.Location) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingDependencyError("transformers", extra="evaluate", purpose="a model of that family") from error
    return AutoModelForCausalLM.from_pretrained(os.fspath(folder), local_files_only=True, use_safetensors=True)


def open_model_tokenizer(folder: storage.Location, tokenizer: storage.Location | None) -> Tokenizer:
    """The tokenizer that was named, or the one beside the model."""
    return open_tokenizer(tokenizer if tokenizer is not None else folder)
