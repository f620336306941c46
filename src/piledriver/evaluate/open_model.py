"""A model to score from a folder: one that we trained, or one of `transformers`."""

from __future__ import annotations

import os
from typing import Any

import torch

from piledriver.core import storage
from piledriver.core.errors import ConfigError, CorruptFileError, MissingDependencyError, StorageError, UnknownNameError
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.evaluate.scorers import Scorer, TransformerScorer, TransformersScorer
from piledriver.models.interchange import InterchangeError, load_folder, read_folder_config


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
        read_folder_config(folder)
    except (InterchangeError, UnknownNameError, ConfigError):
        # A family, or an option of one, that is not ours. What else is wrong with a folder is wrong for them too.
        return TransformersScorer(_transformers_model(folder).to(device), length)
    return TransformerScorer(load_folder(folder).to(device), length)


def _transformers_model(folder: storage.Location) -> Any:
    try:
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingDependencyError("transformers", extra="evaluate", purpose="a model of that family") from error
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            os.fspath(folder), local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        said = str(error).strip().partition("\n")[0]  # they explain at length
        raise StorageError(
            f"transformers cannot open {os.fspath(folder)}: {said}", fix="give the folder of a causal language model"
        ) from error
    if told["missing_keys"]:
        # They would be drawn at random, and the figures would be those of another model.
        raise CorruptFileError(
            f"{os.fspath(folder)} has no tensor {sorted(told['missing_keys'])[0]}", fix="save the checkpoint again"
        )
    return model


def open_model_tokenizer(folder: storage.Location, tokenizer: storage.Location | None) -> Tokenizer:
    """The tokenizer that was named, or the one beside the model."""
    return open_tokenizer(tokenizer if tokenizer is not None else folder)
