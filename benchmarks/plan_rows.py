"""Published runs as layouts that the planner predicts: one row of the tables to a model, a layout, a cluster, a batch.

The tables are CSV files with one schema; see docs/plan.md for the columns.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from piledriver.core.errors import PiledriverError
from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.parameters import Stage, even_stages
from piledriver.plan.blocks.setting import Traits
from piledriver.plan.hardware.catalog import make_cluster
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.memory.phases import Timeline
from piledriver.plan.memory.timeline import step_timelines
from piledriver.plan.time.rates import Efficiency
from piledriver.plan.time.step import step_time

GIB = 2**30
_OLD = Traits(
    name="megatron",
    flash_attention=False,
    causal=False,
    fused_gate=False,
    chunked_loss=False,
    overlap=0.0,
    memory_passes=1.3,
    dropout=True,
    fp32_gradients=False,
    master_copy=True,
    scatter_sends=True,
    stage_buffers=False,
)
# FlashAttention-2 on Hopper, beside kernels that use its asynchronous matrix units (arXiv 2407.08608, figures 5 and 6).
_FLASH_2 = 0.63
# What runs of collectives split beside matrix products hides of them.
_ASYNC_TP = 0.6
_TORCHTITAN = Traits(
    name="torchtitan",
    fused_gate=False,
    chunked_loss=False,
    overlap=1.0,
    alternate_products=True,
    hopper_attention=_FLASH_2,
    fp8_gathers=True,
    scatter_sends=True,
)
SOFTWARE = {
    "vtrain": _OLD,
    "megatron-2022": _OLD,
    "bigscience": replace(_OLD, fp32_gradients=True),
    "megatron": replace(
        _OLD,
        flash_attention=True,
        causal=True,
        dropout=False,
        overlap=1.0,
        overlap_tp=_ASYNC_TP,
        overlap_sends=True,
        fused_casts=True,
        fp8_gathers=True,
        fp32_gradients=True,
        delayed_scales=True,
    ),
    # Until its 0.8 attention is FlashAttention-2; its GPT models drop out by default.
    "megatron-2024": replace(
        _OLD,
        flash_attention=True,
        causal=True,
        overlap=1.0,
        overlap_tp=_ASYNC_TP,
        overlap_sends=True,
        fp32_gradients=True,
        hopper_attention=_FLASH_2,
    ),
    "llm-foundry": Traits(
        name="llm-foundry",
        fused_gate=False,
        chunked_loss=False,
        overlap=1.0,
        memory_passes=1.6,
        dropout=False,
        delayed_scales=True,
        hopper_attention=_FLASH_2,
    ),
    "torchtitan": _TORCHTITAN,
    # Until 2025 its loss ran eagerly beside compiled blocks ("compiling loss function causes CUDA errors").
    "torchtitan-2024": replace(_TORCHTITAN, compiled_loss=False),
    "torchtitan-2024-async": replace(_TORCHTITAN, compiled_loss=False, overlap_tp=_ASYNC_TP, reordered_gathers=True),
}


@dataclass(frozen=True)
class Row:
    """One published run."""

    id: str
    group: str
    """Model shape and accelerator: hold-outs leave out whole groups."""
    software: str
    config: ModelConfig
    layout: Layout
    cluster: Cluster
    length: int
    sequences: int
    accumulation: int
    compiled: bool
    seconds: float | None
    memory: float | None
    memory_kind: str
    notes: str

    def predict(self, efficiency: Efficiency) -> float:
        """Return the predicted seconds of a step."""
        return step_time(
            self.config,
            self.layout,
            self.cluster,
            length=self.length,
            sequences=self.sequences,
            accumulation=self.accumulation,
            compiled=self.compiled,
            traits=SOFTWARE[self.software],
            efficiency=efficiency,
            stages=stages_of_row(self),
        ).total


def timelines_of(row: Row) -> list[Timeline]:
    """Return the predicted memory of a row."""
    return step_timelines(
        row.config,
        row.layout,
        length=row.length,
        sequences=row.sequences,
        accumulation=row.accumulation,
        compiled=row.compiled,
        traits=SOFTWARE[row.software],
        stages=stages_of_row(row),
    )


def stages_of_row(row: Row) -> tuple[Stage, ...]:
    """Return the stages as the software cuts them: evenly, or, as torchtitan, with what is left in those between."""
    layers, count = row.config.layers, row.layout.stages
    if not row.software.startswith("torchtitan") or count < 3:
        return even_stages(row.config, count)
    few, more = divmod(layers, count)
    sizes = [few, *(few + (number < more) for number in range(count - 2))]
    edges = [0, *itertools.accumulate(sizes), layers]
    return tuple(
        Stage(range(begin, end), number == 0, number == count - 1)
        for number, (begin, end) in enumerate(itertools.pairwise(edges))
    )


class RowError(ValueError):
    """A row that cannot be expressed as a layout; the message says why."""


def read_rows(folder: Path, name: str) -> list[Row]:
    """Return the rows of one table that can be expressed as a layout."""
    return parse_table(folder, name)[0]


@functools.cache
def parse_table(folder: Path, name: str) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the rows of one table, and of those that cannot be expressed as a layout the id and the reason."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return [], []
    found, others = [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line, given in enumerate(csv.DictReader(file), 2):
            # A missing column is a blank one.
            raw = defaultdict(str, {key: (text or "").strip() for key, text in given.items() if key is not None})
            try:
                found.append(_row(name, raw))
            except (RowError, PiledriverError) as error:
                others.append((raw["id"] or f"line {line}", str(error).splitlines()[0]))
    return found, others


def _number(raw: Mapping[str, str], key: str) -> float:
    """Return a positive number of a column; raises `RowError` if it is blank or none."""
    try:
        value = float(raw[key].replace(",", ""))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise RowError(f"{key} is {raw[key]!r}" if raw[key] else f"no {key}")
    return value


def _row(table: str, raw: Mapping[str, str]) -> Row:
    number: Callable[[str, int], int] = lambda key, default: int(_number(raw, key)) if raw[key] else default  # noqa: E731
    if raw["status"] not in ("", "ok"):
        raise RowError(f"status is {raw['status']!r}")
    for key in ("layers", "seq_len", "hidden", "heads", "n_accelerators"):
        _number(raw, key)
    software = _software(table, raw)
    count, length = number("n_accelerators", 0), number("seq_len", 0)
    tp, pp, cp, ep = (number(key, 1) for key in ("tp", "pp", "cp", "ep"))
    virtual = number("vpp", 0) or _virtual_stages(raw, pp)
    if count % (tp * pp * cp):
        raise RowError(f"{count} devices are not divisible by tp {tp} x pp {pp} x cp {cp}")
    dp = count // (tp * pp * cp)
    batch = number("global_batch", 0)
    micro = number("micro_batch", 0)
    if table == "torchtitan" and pp > 1:
        # The default of its configs: as many pipeline micro-batches as stages.
        local = re.search(r"local batch (\d+)", raw["notes"])
        micro = max(1, int(local[1]) // pp) if local else micro
        batch = dp * micro * pp
    if not batch:
        batch = dp * (micro or 1) * (1 if pp == 1 else 2 * pp)
    config = _config(raw, length)
    layout = _layout(raw, tp, pp, cp, ep, virtual).on(count)
    cluster = make_cluster(
        raw["accelerator"],
        count,
        **({"node_size": number("node_size", 8)} if raw["node_size"] else {}),
        **_network(raw),
    )
    if not micro and raw["model"].startswith("gpt2-"):
        micro = batch // dp  # in 2020 it did not accumulate gradients
    if not micro:
        micro = 1 if software in ("megatron", "megatron-2024") and pp > 1 else _usual_micro_batch(batch // dp, config)
    micro = min(micro, max(1, batch // dp))
    accumulation = max(1, round(batch / dp / micro))
    seconds = _seconds(raw, config, count, batch, length, layout)
    return Row(
        raw["id"],
        f"{raw['model']} {raw['accelerator']}",
        software,
        config,
        layout,
        cluster,
        length,
        micro,
        accumulation,
        raw["compile"] == "yes",
        seconds,
        _number(raw, "memory_gib") if raw["memory_gib"] else None,
        raw["memory_kind"],
        raw["notes"],
    )


def _software(table: str, raw: Mapping[str, str]) -> str:
    if table == "torchtitan" and ("202412" in raw["source"] or "docs/performance" in raw["source"]):
        return "torchtitan-2024-async" if "async TP" in raw["notes"] else "torchtitan-2024"
    if table.startswith("vtrain"):
        return "vtrain"
    if table == "megatron":
        if not raw["accelerator"].startswith("h"):
            return "megatron-2022"
        return "megatron-2024" if "r0.8" in raw["notes"] else "megatron"
    return {"llm_foundry": "llm-foundry"}.get(table, table)


def _network(raw: Mapping[str, str]) -> dict[str, object]:
    accelerator = raw["accelerator"]
    if accelerator.startswith("a100") and raw["framework"].startswith("megatron-lm"):
        return {"network": "infiniband-hdr-8"}  # Selene: eight HDR adapters a node
    if "800 Gb/s" in raw["interconnect"]:
        return {"network": {"gigabytes": 12.5, "microseconds": 12}}
    return {}


def _config(raw: Mapping[str, str], length: int) -> ModelConfig:
    dim, heads = int(_number(raw, "hidden")), int(_number(raw, "heads"))
    ffn = int(_number(raw, "ffn")) if raw["ffn"] else 4 * dim
    vocab = int(_number(raw, "vocab")) if raw["vocab"] else 51200
    if not raw["model"].startswith("mpt"):
        vocab = -(-vocab // 128) * 128  # Megatron pads the vocabulary
    llama = "llama" in raw["model"] or "mistral" in raw["model"]
    common = {
        "vocab_size": vocab,
        "dim": dim,
        "layers": int(_number(raw, "layers")),
        "heads": heads,
        "kv_heads": int(_number(raw, "kv_heads")) if raw["kv_heads"] else heads,
        "mlp_dim": ffn,
        "max_positions": length,
    }
    if llama:
        return ModelConfig(**common, tied=False)
    bias = not raw["model"].startswith("mpt")
    return ModelConfig(
        **common,
        positions="learned",
        norm="layer",
        norm_bias=bias,
        mlp="plain",
        activation="gelu",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


def _layout(raw: Mapping[str, str], tp: int, pp: int, cp: int, ep: int, vpp: int) -> Layout:
    if raw["zero_stage"] not in ("", "0", "1", "2", "3"):
        raise RowError(f"zero_stage is {raw['zero_stage']!r}")
    zero = int(raw["zero_stage"] or 0)
    if not raw["zero_stage"] and raw["framework"].startswith("megatron") and raw["accelerator"].startswith("h"):
        zero = 1  # parameters are gathered beside the forward: what its distributed optimizer does
    policy = {"full": "full", "selective": "selective"}.get(raw["recompute"], "keep")
    if raw["model"].startswith("gpt2-") and raw["framework"].startswith("megatron"):
        policy = "full"  # the runs of 2020 checkpoint every block (arXiv 1909.08053)
    by_layer = {"activations": "full", "activation_every": 2} if "selective: by layer" in raw["notes"] else {}
    precision = {"fp8": "fp8", "fp16": "fp16", "fp32": "fp32"}.get(raw["precision"], "bf16")
    sequence = "no sequence parallelism" not in raw["notes"] and raw["framework"] != "megatron-deepspeed"
    if raw["framework"].startswith("megatron-lm") and not raw["accelerator"].startswith("h"):
        sequence = "sequence parallelism" in raw["notes"] and sequence  # since May 2022 (arXiv 2205.05198)
    several = {"schedule": "interleaved-1f1b", "stages_per_rank": vpp} if pp > 1 and vpp > 1 else {}
    if ep > 1 and zero in (1, 2):
        zero = 0
    return Layout(
        zero=zero,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        precision=precision,
        sequence_parallel=sequence,
        **{"activations": policy, **by_layer},
        **several,
    )


def _virtual_stages(raw: Mapping[str, str], pp: int) -> int:
    """Return stages of two blocks, as in the recipes of NeMo and MLPerf, where Megatron overlapped its sends.

    It does so with the interleaved schedule only.
    """
    if pp == 1 or "PP communication" not in raw["notes"]:
        return 1
    return max(1, int(_number(raw, "layers")) // pp // 2)


def _usual_micro_batch(batch: int, config: ModelConfig) -> int:
    """The source does not say: what these runs used at that width (arXiv 2104.04473, figure 7)."""
    wanted = 8 if config.dim <= 4096 else 4 if config.dim <= 8192 else 2 if config.dim <= 12288 else 1
    return max(size for size in (1, 2, 4, 8) if size <= wanted and batch % size == 0)


def _seconds(
    raw: Mapping[str, str], config: ModelConfig, count: int, batch: int, length: int, layout: Layout
) -> float | None:
    if raw["step_time_s"]:
        return _number(raw, "step_time_s")
    tokens = batch * length
    if raw["tokens_per_s_per_device"]:
        return tokens / (count * _number(raw, "tokens_per_s_per_device"))
    if raw["tflops_per_device"] and "hardware FLOPs" in raw["notes"]:
        return hardware_flops(config, tokens, length) / (count * _number(raw, "tflops_per_device") * 1e12)
    if raw["mfu"] and raw["tflops_per_device"]:
        flops = model_flops(config, tokens, length)
        return flops / (count * _number(raw, "tflops_per_device") * 1e12)
    return None


def hardware_flops(config: ModelConfig, tokens: int, length: int) -> float:
    """Return 96 B s l h^2 (1 + s / 6h + V / 16lh), as arXiv 2104.04473 counts (recomputation included)."""
    h, layers = config.dim, config.layers
    return 96 * tokens * layers * h * h * (1 + length / (6 * h) + config.vocab_size / (16 * layers * h))


def model_flops(config: ModelConfig, tokens: int, length: int) -> float:
    """Return 72 B s l h^2 (1 + s / 6h + V / 12lh): the same without recomputation, attention in full."""
    h, layers = config.dim, config.layers
    return 72 * tokens * layers * h * h * (1 + length / (6 * h) + config.vocab_size / (12 * layers * h))


@functools.cache
def tables() -> tuple[str, ...]:
    """Return the tables that are compared by time."""
    return ("vtrain_single", "vtrain_multi", "llm_foundry", "megatron", "torchtitan")
