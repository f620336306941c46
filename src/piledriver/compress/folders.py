"""Compress a model folder as a config says, and write the result to another folder."""

from __future__ import annotations

import fnmatch
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from piledriver.compress.calibration import Calibration, open_for_blocks
from piledriver.compress.comparison import compare_models
from piledriver.compress.distil import start_from_codes
from piledriver.compress.prune import CompareWithin, PruneMethod, prune
from piledriver.compress.quantise import Method, quantise
from piledriver.compress.scheme import Scheme
from piledriver.compress.structured import SmallerShape
from piledriver.compress.structured.prune_shape import LayerScore
from piledriver.core import storage
from piledriver.core.errors import ConfigError
from piledriver.data import StreamConfig, open_stream
from piledriver.data.tokenizer.open import NoTokenizerError
from piledriver.data.tokens.token_set import TokenizerMismatchError
from piledriver.models import Transformer
from piledriver.models.interchange import (
    copy_model_files,
    layers_kept_dense,
    read_folder_config,
    save_folder,
    write_config,
)

VocabularyKind = Literal["int8", "fp8"]


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """What `quantise` and `prune` have in common."""

    model: str
    """Model folder with config.json and safetensors."""
    out: str
    """Folder to write."""
    data: StreamConfig | None = None
    """Token shards of the calibration text, and the length of its windows."""
    samples: int = 128
    """Windows of calibration text."""
    start: int = 0
    """First window of the stream that is read."""
    skip: tuple[str, ...] = ()
    """Patterns of layer names that stay as they are, such as blocks.0.* or *.mlp.down."""
    device: str | None = None
    """Device to which one block at a time is moved; default: a GPU if there is one."""
    batch_tokens: int = 8192
    """Tokens of the calibration text that a block computes at a time."""
    damping: float = 0.01
    """Part of the Hessian's mean diagonal that is added to it (gptq, sparsegpt, a shape)."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.start < 0 or self.batch_tokens < 1 or self.damping < 0:
            raise ConfigError(
                f"samples is {self.samples}, start {self.start}, batch_tokens {self.batch_tokens}, "
                f"damping {self.damping}",
                fix="give samples and batch_tokens from 1, start and damping from 0 up",
            )
        if os.path.realpath(self.out) == os.path.realpath(self.model):
            raise ConfigError(f"out is {self.out}, the folder of the model", fix="write to another folder")


@dataclass(frozen=True, kw_only=True)
class QuantiseConfig(CompressConfig):
    """Config of `piledriver compress quantise`."""

    scheme: str = "w4a16-g128"
    """Format of the weights: w4a16-g32, -g64, -g128 (-asym), w8a16, w8a8, w8a16-fp8, w8a8-fp8."""
    method: Method = "gptq"
    """Round to nearest (rtn), or calibrate (gptq, awq, smoothquant)."""
    keep_sensitive: int = 0
    """Layers with the largest error that stay as they are."""
    head: VocabularyKind | None = None
    """Round the output projection too, and with it a tied embedding: int8 or fp8."""
    embedding: VocabularyKind | None = None
    """Round the embedding too, and with it a tied output projection: int8 or fp8."""
    activation_order: bool = True
    """gptq: round the columns with the largest inputs first."""
    static_groups: bool = True
    """gptq without activation_order: false computes the scales of a group when it is reached."""
    true_sequential: bool = True
    """gptq: the inputs of a layer are those that the quantised layers of its own block give."""
    for_training: bool = False
    """Write dense weights that round to the codes (gptq, rtn): the start of quantisation-aware training."""
    smoothing: float = 0.5
    """smoothquant: how much of the outliers of activations goes into the weights, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class PruneConfig(CompressConfig):
    """Config of `piledriver compress prune`."""

    sparsity: float | None = None
    """Share of the weights to remove; default: 0.5."""
    pattern: Literal["2of4", "4of8"] | None = None
    """Keep 2 of every 4 or 4 of every 8 consecutive weights, in place of a share."""
    method: PruneMethod = "wanda"
    """How weights are chosen."""
    compare: CompareWithin = "row"
    """Weights that compete with each other: those of a row, or (magnitude, wanda) of a layer."""
    shape: SmallerShape | None = None
    """Remove whole parts instead, and write a plain smaller model: the sizes to keep."""
    layer_score: LayerScore = "influence"
    """How layers are chosen with a shape: by block influence, or by the loss without them."""
    correct: bool = True
    """With a shape: refit the output projections of attention and MLP to the inputs that stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("sparsity", "pattern", "shape") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given together", fix="leave out all but one")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Config of `piledriver compress report`."""

    models: tuple[str, ...]
    """Model folders; the others are compared with the first."""
    corpus: str
    """Text shards of unseen text."""
    out: str
    """Folder for report.html and report.json."""
    documents: int = 100
    """Documents to score, spread evenly over the corpus."""
    tokenizer: str | None = None
    """Tokenizer; default: each model's own, or that of the first model that has one."""
    speed: bool = True
    """Measure decoded tokens per second at batch 1 and 32."""
    device: str | None = None
    """Device; default: a GPU if there is one."""


def report_folders(config: ReportConfig) -> dict[str, Any]:
    """Compare model folders, write the report, and return it."""
    return compare_models(
        config.models,
        config.corpus,
        tokenizer=config.tokenizer,
        documents=config.documents,
        out=config.out,
        device=config.device,
        speed=config.speed,
        show_progress=True,
    )


def quantise_folder(config: QuantiseConfig) -> dict[str, Any]:
    """Quantise a model folder, write the result, and return the record of what was done."""
    storage.require_writable(config.out)
    if config.method != "rtn" or config.keep_sensitive:
        _require_data(config, f"method {config.method}" if config.method != "rtn" else "keep_sensitive")
    if config.for_training and (config.method not in ("gptq", "rtn") or config.head or config.embedding):
        raise ConfigError(
            "for_training is for method gptq or rtn, without head and embedding", fix="leave it out, or change method"
        )
    model, device = open_for_blocks(config.model, config.device)
    if not config.for_training:
        _check_family(model, config)
    small = quantise(
        model,
        config.scheme,
        method=config.method,
        data=_calibration(config),
        skip=config.skip,
        keep_sensitive=config.keep_sensitive,
        head=config.head,
        embedding=config.embedding,
        activation_order=config.activation_order,
        static_groups=config.static_groups,
        true_sequential=config.true_sequential,
        damping=config.damping,
        smoothing=config.smoothing,
        device=device,
        batch_tokens=config.batch_tokens,
        in_place=not config.for_training,
        show_progress=True,
    )
    if config.for_training:
        start = start_from_codes(model, small)
        start.compression.append(small.compression[-1] | {"for_training": True})
        return _save(start, config)
    return _save(small, config)


def _check_family(model: Transformer, config: QuantiseConfig) -> None:
    """Raise `ConfigError` for a layer that no quantised folder of the model's family can hold, before it is rounded."""
    dense = layers_kept_dense(model)
    kinds = sorted({f"*.{name.split('.', 2)[2]}" for name in dense})
    for name, why in dense.items():
        chosen = not any(fnmatch.fnmatch(name, pattern) for pattern in config.skip)
        if chosen and not (name.endswith(".experts") and Scheme.named(config.scheme).dynamic):
            raise ConfigError(
                f"{name} cannot be written quantised: {why}", fix=f"use a model of another family, or skip={kinds}"
            )


def prune_folder(config: PruneConfig) -> dict[str, Any]:
    """Prune a model folder, write the result, and return the record of what was done."""
    storage.require_writable(config.out)
    if config.shape is not None or config.method != "magnitude":
        _require_data(config, "a shape" if config.shape is not None else f"method {config.method}")
    share = 0.5 if config.sparsity is None else config.sparsity
    amount: float | str = share if config.pattern is None else config.pattern.replace("of", ":")
    model, device = open_for_blocks(config.model, config.device)
    if config.shape is not None:
        config.shape.check(model.config)
        layers = range(config.shape.layers or model.config.layers)
        write_config(config.shape.config_of(model.config, kept_layers=layers))  # a shape that no family has is refused
    small = prune(
        model,
        config.shape or amount,
        method=config.method,
        compare=config.compare,
        data=_calibration(config),
        skip=config.skip,
        damping=config.damping,
        layer_score=config.layer_score,
        correct=config.correct,
        device=device,
        batch_tokens=config.batch_tokens,
        in_place=True,
        show_progress=True,
    )
    return _save(small, config)


def _require_data(config: CompressConfig, what: str) -> None:
    """Raise `ConfigError` without calibration text, before the model is read."""
    if config.data is None:
        raise ConfigError(
            f"{what} needs calibration text, and data is not set",
            fix="set data.tokens to a folder of `piledriver tokenize`, and data.seq_len",
        )


def _calibration(config: CompressConfig) -> Calibration | None:
    if config.data is None:
        return None
    stream = open_stream(config.data, vocab_size=read_folder_config(config.model)[0].vocab_size)
    with suppress(NoTokenizerError):
        if not stream.tokens.has_ids_of(config.model):
            raise TokenizerMismatchError(
                f"{config.data.tokens} was made with another tokenizer than that of {config.model}",
                fix=f"tokenise the calibration text with piledriver tokenize --tokenizer {config.model}",
            )
    if config.start >= stream.epoch_windows:
        raise ConfigError(
            f"start is {config.start}, and an epoch has {stream.epoch_windows} windows", fix="give a smaller start"
        )
    return Calibration.of(stream, samples=config.samples, cursor=stream.advance(stream.start, config.start))


def _save(model: Transformer, config: CompressConfig) -> dict[str, Any]:
    os.makedirs(config.out, exist_ok=True)
    copy_model_files(config.model, config.out)
    save_folder(model, config.out)
    return model.compression[-1]
