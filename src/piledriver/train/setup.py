"""What a run is made of, in the order in which the parts need each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from piledriver.accelerator import Accelerator
from piledriver.core.errors import ConfigError, PiledriverError
from piledriver.data.stream.token_stream import StreamConfig, TokenStream, open_stream
from piledriver.engine import Layout
from piledriver.engine.compile import apply_compile
from piledriver.engine.mesh import make_mesh
from piledriver.models import ModelConfig, Transformer
from piledriver.models.model_size import parameter_count
from piledriver.observe.flops import peak_flops
from piledriver.observe.trackers import choose_trackers
from piledriver.runtime.seeds import set_seed
from piledriver.runtime.world import World
from piledriver.train.batching import Batching, cut_batch
from piledriver.train.config import TrainConfig
from piledriver.train.resume import check_same_run, last_checkpoint, shape_of
from piledriver.train.text import make_tokens


@dataclass(frozen=True)
class Parts:
    """What the rest of the run is built on."""

    config: TrainConfig
    accelerator: Accelerator
    shape: ModelConfig
    batching: Batching
    tokens: str
    """The folder of the token shards."""
    stream: TokenStream
    checkpoint: Path | None
    """The last one of the run's folder when it began: what it goes on from."""

    @property
    def world(self) -> World:
        """This process among the others."""
        return cast(World, self.accelerator.world)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return cast(torch.device, self.accelerator.device)

    @property
    def data_place(self) -> tuple[int, int]:
        """Which share of the batch this process reads, of how many.

        Processes that split a matrix, a sequence or the blocks among them read the same.
        """
        mesh = self.accelerator.mesh
        if mesh is None:
            return self.world.rank, self.world.size
        return mesh.data_rank, mesh.layout.data_size

    @property
    def name(self) -> str:
        """What the progress bar calls the model."""
        name = self.config.model if isinstance(self.config.model, str) else "model"
        return f"{name} ({parameter_count(self.shape) / 1e6:.1f}M)"


def make_parts(config: TrainConfig) -> Parts:
    """Everything before the model. What can be refused is refused before anything is written."""
    choose_trackers([*(config.trackers or ())], logging_dir=config.out)
    _check_out(config.out)
    shape = shape_of(config)
    _check_length(config, shape)
    checkpoint = last_checkpoint(config.out)
    check_same_run(config, checkpoint)
    accelerator = _make_accelerator(config)
    set_seed(config.seed)
    torch.use_deterministic_algorithms(config.deterministic, warn_only=not config.deterministic)
    mesh, world = accelerator.mesh, accelerator.world
    batching = cut_batch(
        config.batch_tokens,
        config.data.seq_len or shape.max_positions,
        world.size if mesh is None else mesh.layout.data_size,
        config.micro_batch_tokens,
        accelerator.device.type,
    )
    _check_budget(config, batching)
    accelerator.gradient_accumulation_steps = batching.accumulation
    tokens = make_tokens(config, shape.vocab_size, world)
    stream = _open_stream(config, tokens, shape, batching)
    return Parts(config, accelerator, shape, batching, tokens, stream, checkpoint)


def _check_out(out: str) -> None:
    for folder in (Path(out), *Path(out).parents):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(
                f"out is {out}, but {folder} is a file", fix="name a folder, new or of a run to go on with"
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


def _make_accelerator(config: TrainConfig) -> Accelerator:
    if config.layout is None:
        return Accelerator(mixed_precision="fp16" if config.precision == "fp16" else "no")
    return Accelerator(
        layout=config.layout if config.compile is None else replace(config.layout, compile=config.compile)
    )


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


def make_model(parts: Parts) -> Transformer:
    """The model with its first weights. A layout sets its precision when it is applied, and compiles it."""
    config, device = parts.config, parts.device
    with _room_for(parts.shape):
        model = Transformer(parts.shape, seed=config.seed).to(device)
    in_bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    if config.layout is None and in_bf16:
        model.compute_dtype = torch.bfloat16
    model.z_loss = config.z_loss
    return model


@contextmanager
def _room_for(shape: ModelConfig) -> Iterator[None]:
    """Turn torch's error where not even the weights have room into ours. A CPU's is told by its words alone."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise PiledriverError(
            f"the weights of {parameter_count(shape):.3g} parameters do not fit into memory",
            fix="choose a smaller model, or a machine with more",
        ) from error


def compile_model(model: Transformer, parts: Parts) -> None:
    """Where there is no layout, which would say itself what of it is compiled: as asked, else whole on a GPU."""
    wanted = parts.config.compile
    if parts.config.layout is not None:
        return
    if wanted == "model" or (wanted is None and parts.device.type == "cuda"):
        model.compile()
    elif wanted:
        apply_compile(model, make_mesh(Layout(compile=wanted), parts.device.type))


def peak_of(parts: Parts, model: Transformer) -> float | None:
    """What MFU is a part of, from the device's datasheet; what a CPU could do depends on who else uses it."""
    if parts.device.type != "cuda":
        return None
    layout = parts.config.layout
    wide = model.compute_dtype is None if layout is None else layout.precision == "fp32"
    return peak_flops(torch.cuda.get_device_name(), torch.float32 if wide else torch.bfloat16)
