"""Build the components of a run: accelerator, batching, token stream, and the model on the meta device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from piledriver.accelerator import Accelerator
from piledriver.core.errors import ConfigError, PiledriverError
from piledriver.data.stream.token_stream import StreamConfig, TokenStream, open_stream
from piledriver.engine import Layout
from piledriver.engine.layout import SPLIT_BACKWARD
from piledriver.models import ModelConfig, Transformer, initialise
from piledriver.models.model_size import parameter_count, short_count
from piledriver.models.presets import learning_rate
from piledriver.observe.flops import peak_flops
from piledriver.observe.trackers import choose_trackers
from piledriver.runtime.seeds import set_seed
from piledriver.runtime.world import World, detect_world
from piledriver.train.batching import Batching, cut_batch
from piledriver.train.config import TrainConfig
from piledriver.train.layout.choice import choose_layout
from piledriver.train.pretrained import describe_source, weights_of
from piledriver.train.resume import check_same_run, last_checkpoint, saved_config, shape_of
from piledriver.train.text import make_tokens

# Peak learning rates relative to AdamW's: Lion's updates are larger, Muon's are normalised.
_RATE_FACTORS = {"lion": 0.2, "muon": 4.0}


@dataclass(frozen=True)
class RunComponents:
    """The components of a run that exist before the model."""

    config: TrainConfig
    accelerator: Accelerator
    shape: ModelConfig
    batching: Batching
    tokens: str
    """The folder of the token shards."""
    stream: TokenStream
    checkpoint: Path | None
    """The checkpoint that the run resumes from."""
    layout_reason: str = ""
    """Why the planner chose the layout; empty if the config names it."""

    @property
    def world(self) -> World:
        """This process among all processes."""
        return cast(World, self.accelerator.world)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return cast(torch.device, self.accelerator.device)

    @property
    def layout(self) -> Layout:
        """The layout, with every value resolved."""
        return cast(Layout, self.accelerator.layout)

    @property
    def data_place(self) -> tuple[int, int]:
        """(rank, size) in the data-parallel group: ranks that differ in tp, cp or pp only read the same batches."""
        return self.accelerator.mesh.data_rank, self.layout.data_size

    @property
    def name(self) -> str:
        """The model's name for display."""
        name = self.config.model if isinstance(self.config.model, str) else "model"
        name = name if self.config.model_folder is None else Path(name).name
        return f"{name} ({short_count(parameter_count(self.shape))})"


def build_components(config: TrainConfig) -> RunComponents:
    """Return the components before the model; an invalid config is rejected before anything is written."""
    choose_trackers([*(config.trackers or ())], logging_dir=config.out)
    _check_out(config.out)
    shape = shape_of(config)
    _check_length(config, shape)
    checkpoint = last_checkpoint(config.out)
    before = saved_config(config.out, checkpoint)
    config = _with_learning_rate(config, shape, before)
    check_same_run(config, before)
    accelerator = Accelerator(layout=_with_compile_chosen(config.layout))
    config, chosen = choose_layout(config, shape, accelerator)
    if chosen and accelerator.device.type == "cuda":
        accelerator.use_layout(_with_compile_chosen(config.layout))
    set_seed(config.seed)
    torch.use_deterministic_algorithms(config.deterministic, warn_only=not config.deterministic)
    world = accelerator.world
    batching = cut_batch(
        config.batch_tokens,
        config.data.seq_len or shape.max_positions,
        accelerator.layout.data_size,
        config.micro_batch_tokens,
        accelerator.device.type,
    )
    _check_budget(config, batching)
    accelerator.gradient_accumulation_steps = batching.accumulation
    tokens = make_tokens(config, shape.vocab_size, world)
    stream = _open_stream(config, tokens, shape, batching)
    return RunComponents(config, accelerator, shape, batching, tokens, stream, checkpoint, chosen)


def _with_learning_rate(config: TrainConfig, shape: ModelConfig, before: TrainConfig | None) -> TrainConfig:
    """Return the config with a learning rate: the given one, that of the run to resume, or that of the model.

    The model's rate is scaled for the optimizer.
    """
    if config.optimizer.lr is not None:
        return config
    if before is not None and before.optimizer.lr is not None:
        return replace(config, optimizer=replace(config.optimizer, lr=before.optimizer.lr))
    rate = default_learning_rate(config.model if config.model_folder is None else shape, config.optimizer.kind)
    return replace(config, optimizer=replace(config.optimizer, lr=rate))


def default_learning_rate(model: str | ModelConfig, optimizer: str) -> float:
    """Return the peak learning rate of pretraining for a preset or a shape and an optimizer by name."""
    return float(f"{learning_rate(model) * _RATE_FACTORS.get(optimizer, 1.0):.1e}")


def _check_out(out: str) -> None:
    for folder in (Path(out), *Path(out).parents):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(
                f"out is {out}, but {folder} is a file", fix="name a new folder, or that of a run to resume"
            )


def _check_length(config: TrainConfig, shape: ModelConfig) -> None:
    if config.data.seq_len is not None and config.data.seq_len > shape.max_positions:
        raise ConfigError(
            f"data.seq_len {config.data.seq_len} is longer than the model's max_positions {shape.max_positions}",
            fix="lower it, or raise model.max_positions",
        )


def _check_budget(config: TrainConfig, batching: Batching) -> None:
    if config.budget_tokens is not None and config.budget_tokens < batching.tokens_per_step:
        raise ConfigError(
            f"budget_tokens {config.budget_tokens} is less than one step of {batching.tokens_per_step} tokens",
            fix="raise it, or lower batch_tokens",
        )


def _with_compile_chosen(layout: Layout) -> Layout:
    """Return the layout with `compile` decided for this machine's devices."""
    if layout.compile is not None:
        return layout
    if detect_world().device.type != "cuda" or (layout.pp > 1 and layout.schedule in SPLIT_BACKWARD):
        return replace(layout, compile=False)
    plain = layout.replicates and layout.activations == "keep" and not layout.activation_offload
    # One graph is faster if nothing runs between blocks; bf16 and fp8 weights are compiled block by block.
    whole = plain and layout.precision in ("auto", "fp32", "bf16", "fp16")
    return replace(layout, compile="model" if whole else "blocks")


def _open_stream(config: TrainConfig, tokens: str, shape: ModelConfig, batching: Batching) -> TokenStream:
    data = config.data
    wanted = StreamConfig(
        tokens=tokens,
        seq_len=batching.seq_len,
        seed=config.seed,
        packing=data.packing,
        mixture=data.mixture,
        exclude_sources=data.exclude_sources,
        exclude_licences=data.exclude_licences,
    )
    return open_stream(wanted, vocab_size=shape.vocab_size)


def make_model(components: RunComponents) -> Transformer:
    """Return the model without memory: applying the layout allocates this rank's shards only."""
    with torch.device("meta"):
        model = Transformer(components.shape)
    model.z_loss = components.config.z_loss
    describe_source(model, components.config)
    return model


def materialise(components: RunComponents, model: Transformer) -> Transformer:
    """Apply the layout to a model on the meta device and initialise it: from the seed of the run, or from a folder.

    The values are drawn on the CPU, each parameter's from the seed and its name, so that they depend on neither the
    layout nor the device. A run that resumes reads the folder for its zeros only: its checkpoint has the weights.
    """
    folder = components.config.model_folder
    fill = partial(initialise, seed=components.config.seed, draw_on=torch.device("cpu"))
    if folder is not None and (components.checkpoint is None or components.config.keep_zeros):
        fill = weights_of(folder)
    with _explained_out_of_memory(components.shape):
        return cast(Transformer, components.accelerator.prepare_model(model, weights=fill))


@contextmanager
def _explained_out_of_memory(shape: ModelConfig) -> Iterator[None]:
    """Re-raise an out-of-memory error as a `PiledriverError`; a CPU's is recognised by its message."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not re.search(
            "allocate memory|not enough memory", str(error)
        ):
            raise
        raise PiledriverError(
            f"this rank's part of {parameter_count(shape):.3g} parameters does not fit into memory",
            fix="shard the model over more ranks (layout.zero=3), or choose a smaller one",
        ) from error


def peak_of(components: RunComponents) -> float | None:
    """Return the device's peak FLOP/s, which MFU is relative to; None on a CPU, whose peak depends on its load."""
    if components.device.type != "cuda":
        return None
    wide = components.layout.precision == "fp32"
    return peak_flops(torch.cuda.get_device_name(), torch.float32 if wide else torch.bfloat16)
