"""Open a model folder for scoring: one that we trained, or one of `transformers`."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from piledriver.core import storage
from piledriver.core.errors import (
    ConfigError,
    CorruptFileError,
    MissingDependencyError,
    StorageError,
    UsageError,
)
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.engine import Layout
from piledriver.evaluate.scorers import Scorer, TransformerScorer, TransformersScorer
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import (
    InterchangeError,
    load_folder,
    load_weights,
    read_folder_config,
    stored_dtype,
)
from piledriver.models.interchange.families import UnknownFamilyError


def open_scorer(
    folder: storage.Location,
    *,
    length: int | None = None,
    device: torch.device | None = None,
    layout: Layout | None = None,
) -> Scorer:
    """Return a scorer for a folder with `config.json` and safetensors.

    Families that we know run as our own model; any other causal model runs through `transformers`. With a `layout` each
    rank reads its part of the weights only: all ranks call this together, in processes that are connected.
    """
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise StorageError(
            f"{folder} has no config.json", fix="give a run's 'model' folder or a transformers checkpoint"
        )
    try:
        config, _ = read_folder_config(folder)
    except (InterchangeError, UnknownFamilyError, ConfigError) as error:
        # A family, or an option of one, that is not ours. Other damage to the folder fails in transformers too.
        if layout is not None:
            raise UsageError(
                f"{os.fspath(folder)} cannot be sharded as {layout}: {error}", fix="evaluate it without a layout"
            ) from error
        return TransformersScorer(_transformers_model(folder).to(device or _default_device()), length)
    if layout is not None:
        return TransformerScorer(_sharded_model(folder, config, layout), length)
    return TransformerScorer(load_folder(folder).to(device or _default_device()), length)


def _default_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _sharded_model(folder: storage.Location, config: ModelConfig, layout: Layout) -> Transformer:
    from piledriver.accelerator import Accelerator

    with torch.device("meta"):
        model = Transformer(config).to(stored_dtype(folder)).requires_grad_(False)
    ready: Transformer = Accelerator(layout=layout).prepare_model(model, weights=partial(load_weights, folder=folder))
    return ready


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
    except (ValueError, OSError, RuntimeError, ImportError, AttributeError, TypeError, SafetensorError) as error:
        said = str(error).strip().partition("\n")[0]  # their messages are long
        needs_package = isinstance(error, ImportError)
        raise StorageError(
            f"transformers cannot open {os.fspath(folder)}: {said}",
            fix="install that package, or save the checkpoint in bf16"
            if needs_package
            else "give the folder of a causal language model",
        ) from error
    if told["missing_keys"]:
        # transformers would draw them at random, and the figures would be those of another model.
        raise CorruptFileError(
            f"{os.fspath(folder)} has no tensor {sorted(told['missing_keys'])[0]}", fix="save the checkpoint again"
        )
    if not _is_causal(model):
        raise UsageError(
            f"{os.fspath(folder)} ({model.config.model_type}) sees the tokens that it would have to predict",
            fix="give the folder of a causal language model",
        )
    return model


@torch.no_grad()
def _is_causal(model: Any) -> bool:
    """Return whether logits do not depend on later tokens: transformers opens encoders as causal models too."""
    logits = model.eval()(input_ids=torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]])).logits[:, :3]
    rounding = 16 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    return float((logits[0] - logits[1]).abs().max()) <= rounding


def open_model_tokenizer(folder: storage.Location, tokenizer: storage.Location | None) -> Tokenizer:
    """Return the named tokenizer, or the one in the model folder."""
    return open_tokenizer(tokenizer if tokenizer is not None else folder)
