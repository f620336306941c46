"""`distil`: train a student as a config says; `recover`: win back what compression lost, in one call."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from piledriver.compress.calibration import Calibration, open_for_blocks
from piledriver.compress.distil.objective import DistilObjective, DistilSettings
from piledriver.compress.distil.reconstruct import reconstruct
from piledriver.compress.quantise import quantise
from piledriver.compress.scheme import Scheme
from piledriver.core import storage
from piledriver.core.config import load_config, save_config, to_mapping
from piledriver.core.errors import ConfigError, UsageError
from piledriver.data import TokenStream
from piledriver.models import Transformer
from piledriver.models.feed_forward.moe import Experts
from piledriver.models.interchange import copy_model_files, load_folder, read_folder_config, save_folder
from piledriver.models.layers import Linear
from piledriver.optim import OptimizerConfig, ScheduleConfig
from piledriver.runtime.world import detect_world
from piledriver.train import DataConfig, RunSummary, TrainConfig, train
from piledriver.train.resume import CHECKPOINTS
from piledriver.train.setup import default_learning_rate

_CONFIG = "distil.yaml"
MODEL, QUANTISED = "model", "quantised"
# Of the peak rate of pretraining (Muralidharan et al., 2024), of `recover` with AdamW, and with rounded weights.
_RATE, _SPARSE_RATE, _AWARE_RATE = 0.2, 0.4, 0.04
# Batches of fewer tokens lower the rate with the square root of their size (Malladi et al., 2022).
_RATE_TOKENS = 8192
# Of `recover`: few tokens in many small steps, and at most this much in one.
_STEPS, _LARGEST_BATCH = 128, 65536
_WARMUP = 0.05


@dataclass(frozen=True, kw_only=True)
class DistilConfig:
    """Config of `piledriver compress distil`."""

    train: TrainConfig
    """The run; `train.model` is the folder of the student. The default learning rate is a fifth of pretraining's, or
    1/25 with `distil.quantise`, and lower for batches of fewer than 8,192 tokens."""
    distil: DistilSettings
    """The teacher and the loss."""


def distil(config: DistilConfig, **options: Any) -> RunSummary:
    """Train a student through the ordinary train loop, or resume the run in `config.train.out`.

    All that the loop does holds here too: every layout of ZeRO, checkpoints, bit-exact resume. With `distil.quantise`
    the finished model is also written to `quantised/`, rounded as it was trained. `options` are those of `train`.
    """
    run = config.train
    if run.model_folder is None:
        raise ConfigError(f"train.model is {run.model!r}", fix="name the folder of the student")
    shape, _ = read_folder_config(run.model_folder)
    if run.optimizer.lr is None:
        share = _RATE if config.distil.quantise is None else _AWARE_RATE
        rate = share * default_learning_rate(shape, run.optimizer.kind)
        run = replace(run, optimizer=replace(run.optimizer, lr=_for_batch(rate, run.batch_tokens)))
    if run.layout.compile is None and torch.cuda.is_available():
        # Block by block: the loss runs outside the graph.
        run = replace(run, layout=replace(run.layout, compile="blocks"))
    config = replace(config, train=run)
    _check_same(config)
    summary = train(run, objective=DistilObjective(config.distil), **options)
    if summary.finished:
        _write_quantised(config)
    return summary


def _for_batch(rate: float, batch_tokens: int) -> float:
    """Return a learning rate for batches of this size.

    >>> _for_batch(4e-4, 65536), _for_batch(4e-4, 2048)
    (0.0004, 0.0002)
    """
    return float(f"{rate * min(1.0, batch_tokens / _RATE_TOKENS) ** 0.5:.1e}")


def _check_same(config: DistilConfig) -> None:
    """Raise `ConfigError` if the run to resume has another teacher or loss; otherwise write the config."""
    path = os.path.join(config.train.out, _CONFIG)
    if os.path.isdir(os.path.join(config.train.out, CHECKPOINTS)) and storage.exists(path):
        before = to_mapping(load_config(DistilConfig, path).distil)
        now = to_mapping(config.distil)
        for name in now:
            if before[name] != now[name]:
                raise ConfigError(
                    f"{config.train.out} holds a run with distil.{name}={before[name]}, not {now[name]}",
                    fix=f"set distil.{name}={before[name]} to resume it, or use another out",
                )
    storage.make_folder(config.train.out)
    save_config(config, path)


def _write_quantised(config: DistilConfig) -> None:
    """Write the model of quantisation-aware training as it was trained: rounded to nearest."""
    scheme, folder = config.distil.quantise, os.path.join(config.train.out, MODEL)
    if scheme is None or not detect_world().is_main or not os.path.isdir(folder):
        return
    dense = load_folder(folder)
    group = Scheme.named(scheme)
    kept: dict[str, str] = {}
    for name, module in dense.blocks.named_modules():
        if type(module) is Linear and not group.fits(module.in_features):
            kept[f"blocks.{name}"] = f"{scheme} does not divide its {module.in_features} columns"
        elif isinstance(module, Experts):
            kept[f"blocks.{name}"] = "experts were not rounded in training"
    small = quantise(dense, scheme, skip=[*config.distil.skip, *kept], in_place=True)
    small.compression[-1]["skipped"] |= kept
    out = os.path.join(config.train.out, QUANTISED)
    storage.make_folder(out)
    copy_model_files(folder, out)
    save_folder(small, out)


def recover(
    model: Transformer | str,
    teacher: Transformer | str,
    data: TokenStream,
    *,
    out: str,
    tokens: int = 0,
    batch_tokens: int | None = None,
    settings: DistilSettings | None = None,
    reconstruction: Calibration | Tensor | TokenStream | None = None,
    samples: int = 128,
    epochs: int = 8,
    lr: float | None = None,
    keep_zeros: bool = True,
    device: torch.device | str | None = None,
    **changes: Any,
) -> Transformer:
    """Return the model after block-wise reconstruction and, with `tokens`, distillation on that many tokens.

    Reconstruction uses the first `samples` windows of `data`, or those of `reconstruction`, for `epochs` passes; 0
    epochs leave it out. Distillation reads the first `tokens` of `data`, in batches of `batch_tokens` (default: small
    enough for 128 steps), by Muon at a fifth of its rate of pretraining, or AdamW at two fifths where zeros stay; the
    rate falls to zero. `out` is the run folder: a call that was interrupted resumes there. `settings` are those of the
    loss (default: half forward KL against `teacher`, half cross-entropy), `changes` further keys of `TrainConfig`.
    Zeros of weights stay with `keep_zeros`.
    """
    start = _folder_of(model, os.path.join(out, "start"))
    large = _folder_of(teacher, os.path.join(out, "teacher"))
    fitted = os.path.join(out, "reconstructed")
    if epochs and not storage.exists(os.path.join(fitted, "config.json")):
        student, place = open_for_blocks(start, device)
        student = reconstruct(
            student,
            open_for_blocks(large, device)[0],
            data if reconstruction is None else reconstruction,
            samples=samples,
            epochs=epochs,
            keep_zeros=keep_zeros,
            device=place,
            in_place=True,
        )
        save_folder(student, fitted)
    start = fitted if epochs else start
    if not tokens:
        return load_folder(start)
    stream = data.config
    if stream.epoch_windows is not None:
        raise UsageError("data has epoch_windows, which a training run does not take", fix="leave it out")
    batch = batch_tokens or _batch_tokens(tokens, stream.seq_len)
    steps = tokens // batch
    keeps = keep_zeros and _has_zeros(start)
    # A step of Muon mixes the weights of a matrix, zeros too.
    kind = "adamw" if keeps else "muon"
    if lr is None:
        peak = default_learning_rate(read_folder_config(start)[0], kind)
        lr = _for_batch((_SPARSE_RATE if keeps else _RATE) * peak, batch)
    defaults: dict[str, Any] = {
        "optimizer": OptimizerConfig(kind=kind, lr=lr),
        "schedule": ScheduleConfig(kind="linear", warmup=round(_WARMUP * steps), total=max(1, steps)),
        "trackers": (),
        "plots": False,
    }
    config = DistilConfig(
        train=TrainConfig(
            model=start,
            data=DataConfig(
                tokens=stream.tokens,
                seq_len=stream.seq_len,
                packing=stream.packing,
                mixture=stream.mixture,
                exclude_sources=stream.exclude_sources,
                exclude_licences=stream.exclude_licences,
            ),
            batch_tokens=batch,
            budget_tokens=tokens,
            out=os.path.join(out, "run"),
            seed=stream.seed,
            keep_zeros=keeps,
            **{**defaults, **changes},
        ),
        distil=replace(settings or DistilSettings(cross_entropy=0.5, teacher=large), teacher=large),
    )
    distil(config)
    return load_folder(os.path.join(out, "run", MODEL))


def _batch_tokens(tokens: int, seq_len: int) -> int:
    """Return the tokens of a step: a power of two of windows, small enough for `_STEPS` steps.

    >>> _batch_tokens(1_250_000, 1024), _batch_tokens(10_240, 256), _batch_tokens(10**9, 2048)
    (8192, 256, 65536)
    """
    windows = max(1, min(tokens // _STEPS, _LARGEST_BATCH) // seq_len)
    return (1 << (windows.bit_length() - 1)) * seq_len


def _folder_of(model: Transformer | str, folder: str) -> str:
    """Return the folder of a model, which is written unless it is there from an earlier call."""
    if isinstance(model, str):
        return model
    if not storage.exists(os.path.join(folder, "config.json")):
        save_folder(model, folder)
    return folder


def _has_zeros(folder: str) -> bool:
    """Return whether the model of a folder was pruned without changing its shape."""
    records = read_folder_config(folder)[1].get("compression") or []
    return any(record.get("act") == "prune" and "zeros" in record for record in records)
