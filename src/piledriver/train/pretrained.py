"""Continued pretraining: a Hugging Face folder as the model of a run.

Its config is the shape, its weights are the initial ones, and its tokenizer reads the corpus. The published folder is
of the same family with its config, generation settings and tokenizer files.
"""

from __future__ import annotations

import os
from functools import partial

from torch import nn

from piledriver.core import storage
from piledriver.core.errors import ConfigError, UsageError
from piledriver.data.tokenizer.open import NoTokenizerError, open_tokenizer
from piledriver.data.tokens.token_set import open_tokens
from piledriver.models import Transformer
from piledriver.models.interchange import copy_model_files, load_weights, read_folder_config, read_generation
from piledriver.train.config import TrainConfig


def load_initial_weights(model: nn.Module, folder: str) -> None:
    """Load the weights of a folder into a model, or into this rank's shards of one."""
    assert isinstance(model, Transformer)
    load_weights(model, folder)


def weights_of(folder: str) -> partial[None]:
    """Return the function that fills a model on the meta device with the weights of a folder."""
    return partial(load_initial_weights, folder=folder)


def tokenizer_of(config: TrainConfig) -> str | None:
    """Return the tokenizer of a run's corpus: of the config, or of the model's folder; None to train one."""
    folder = config.model_folder
    if config.data.tokenizer is not None or folder is None:
        return config.data.tokenizer
    try:
        open_tokenizer(folder)
    except NoTokenizerError as error:
        raise ConfigError(
            f"the model folder {folder} holds no tokenizer",
            fix="set data.tokenizer to the one that it was trained with",
        ) from error
    return folder


def describe_source(model: Transformer, config: TrainConfig) -> None:
    """Record on a model the config.json and generation settings of the folder that it comes from, if any."""
    folder = config.model_folder
    if folder is not None:
        _, model.source_config = read_folder_config(folder)
        model.generation = read_generation(folder, model.source_config)


def has_same_tokenizer(config: TrainConfig, tokens: storage.Location) -> bool | None:
    """Return whether token shards were made with the tokenizer of the model's folder; None if it has none."""
    if config.model_folder is None:
        return None
    try:
        return open_tokens(tokens, check="sizes").has_ids_of(config.model_folder)
    except UsageError:
        return None


def copy_tokenizer_files(config: TrainConfig, tokens: storage.Location, out: storage.Location) -> bool:
    """Copy the files of the model's folder beside its weights, if its tokenizer is that of the token shards."""
    if config.model_folder is None or not has_same_tokenizer(config, tokens):
        return False
    storage.make_folder(out)
    copy_model_files(config.model_folder, out)
    return True


def check_folder(folder: str) -> None:
    """Raise `ConfigError` if a folder cannot be the model of a run."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ConfigError(
            f"model is {folder}, which holds no config.json",
            fix="name a preset (`piledriver presets`) or a folder of transformers with config.json and safetensors",
        )
