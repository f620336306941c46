"""Models of `transformers` through `Accelerator` with a layout, against what one would use instead, on one GPU.

    python benchmarks/huggingface.py                      # Llama at 1.2B and 124M
    python benchmarks/huggingface.py --shapes others      # ten further architectures
    python benchmarks/huggingface.py --shapes gpt2-124m:fp8 gpt2-124m:own-fp8 --kernels gpt2-124m
    python benchmarks/huggingface.py --liger FOLDER       # where Liger-Kernel is unpacked, if not installed

Rows warm up and compile together, `--at-once` at a time, and are timed one after the other with the GPU to themselves.
Random tokens, labels in the call, clipping at 1.0, median step by CUDA events. Peers, all with Accelerate in bf16 and
torch's fused AdamW: `accelerate` (eager), `accelerate-inductor`, `liger` (Liger-Kernel's patches). Ours, the same model
and loop with `Layout(precision=...)`: `bf16` and `fp8` with the same AdamW, `bf16-pure` and `fp8-pure` with
`SplitMasterAdamW` (bf16 weights, exact updates). `own-*`: our `Transformer` of the same shape. One JSON line per shape.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import engine
import in_turn
import model_step

from piledriver import Accelerator
from piledriver.engine import Layout
from piledriver.engine.compile import compile_report
from piledriver.models.presets import preset
from piledriver.optim import OptimizerConfig, build_optimizer

PEERS = ("accelerate", "accelerate-inductor", "liger")
OURS = ("bf16", "bf16-pure", "fp8", "fp8-pure")
OWN = tuple(f"own-{row}" for row in OURS)
LLAMAS = ("gpt2-124m", "llama-1.2b")
_DECODER: dict[str, Any] = {"use_cache": False, "attention_dropout": 0.0, "pad_token_id": 0}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Name to (class, config, rows, length): few layers with the vocabularies of released models, so that all fit together.
OTHERS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "qwen3": (
        "Qwen3ForCausalLM",
        {
            **_DECODER,
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        4,
        2048,
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **_DECODER,
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
        4,
        2048,
    ),
    "mistral": (
        "MistralForCausalLM",
        {
            **_DECODER,
            "vocab_size": 32768,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "sliding_window": None,
        },
        8,
        2048,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"use_cache": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
        16,
        1024,
    ),
    "olmo2": (
        "Olmo2ForCausalLM",
        {
            **_DECODER,
            "vocab_size": 100352,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
        },
        4,
        2048,
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {
            **_DECODER,
            "vocab_size": 32064,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "sliding_window": None,
        },
        8,
        2048,
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            **_DECODER,
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "moe_intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": True,
        },
        4,
        2048,
    ),
    "bert": ("BertForMaskedLM", _NO_DROPOUT, 32, 512),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 12,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
        16,
        512,
    ),
    "vit": ("ViTForImageClassification", {**_NO_DROPOUT, "num_labels": 1000}, 128, 197),
}
_WITHOUT_LIGER = frozenset({"gpt2", "bert", "t5", "vit"})


def llama(shape: str) -> Any:
    """transformers' Llama of one of our presets."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = preset(shape)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.mlp_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.tied,
            use_cache=False,
        )
    )


def model_and_data(shape: str) -> tuple[Any, dict[str, Tensor], int]:
    """A model on the GPU in fp32, the arguments of a call with labels, and its tokens; the same for every row."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        if shape in LLAMAS:
            rows, length = model_step.SHAPES[shape]
            model: Any = llama(shape)
        else:
            import transformers

            name, settings, rows, length = OTHERS[shape]
            kind = getattr(transformers, name)
            model = kind(kind.config_class(**settings))
        model.train()
        if shape == "vit":
            given = {"pixel_values": torch.randn(rows, 3, 224, 224), "labels": torch.randint(1000, (rows,))}
        else:
            tokens = torch.randint(4, model.config.vocab_size, (rows, length))
            given = {"input_ids": tokens, "labels": tokens}
    return model, given, rows * length


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def loop(accelerator: Any, model: Any, optimizer: Any) -> Callable[..., Tensor]:
    """The loop that a user writes, with either `Accelerator`."""

    def step(given: dict[str, Tensor]) -> Tensor:
        try:
            loss: Tensor = model(**given).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finally:
            # Also where memory ran out while others warm up: the step is taken again, from the same weights.
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def theirs(shape: str, row: str) -> tuple[Callable[..., Tensor], dict[str, Tensor], int, dict[str, Any]]:
    from accelerate import Accelerator as Theirs

    accelerator = Theirs(mixed_precision="bf16", dynamo_backend="inductor" if row == "accelerate-inductor" else "no")
    model, given, tokens = model_and_data(shape)
    if row == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    model, optimizer = accelerator.prepare(model, adamw(model))
    return loop(accelerator, model, optimizer), given, tokens, {}


def ours(shape: str, row: str) -> tuple[Callable[..., Tensor], dict[str, Tensor], int, dict[str, Any]]:
    accelerator = Accelerator(layout=Layout(precision=row))  # type: ignore[arg-type]
    model, given, tokens = model_and_data(shape)
    kind = "adamw_split_bf16" if row.endswith("pure") else "adamw"
    optimizer: Any = adamw(model) if kind == "adamw" else build_optimizer(model, OptimizerConfig(kind=kind, lr=3e-4))
    torch.cuda.synchronize()
    begun = time.monotonic()
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.cuda.synchronize()
    about: dict[str, Any] = {"prepare_s": round(time.monotonic() - begun, 2)}
    report = accelerator.describe(model)
    about |= {"fuse_s": round(report.seconds, 2), "fused": len(report.replaced)}
    return loop(accelerator, model, optimizer), given, tokens, about


def own(shape: str, row: str) -> tuple[Callable[..., Tensor], dict[str, Tensor], int, dict[str, Any]]:
    config = preset(shape)
    data = model_step.batch_of(config, *model_step.SHAPES[shape], "cuda")
    precision = row.removeprefix("own-")
    kind = "adamw_split_bf16" if row.endswith("pure") else "adamw"
    step = engine.accelerated_step(config, Layout(precision=precision), kind)  # type: ignore[arg-type]
    return (
        lambda given: step(given["tokens"], given["targets"]),
        dict(zip(("tokens", "targets"), data, strict=True)),
        data[0].numel(),
        {},
    )


def one(name: str, *, kernels: bool = False) -> dict[str, Any]:
    """One row of one shape, in this process."""
    shape, row = name.split(":")
    torch.set_float32_matmul_precision("high")
    make = theirs if row in PEERS else own if row in OWN else ours
    step, given, tokens, about = in_turn.with_patience(lambda: make(shape, row))
    stand_in = torch.empty(tokens)
    numbers = engine.timed(lambda _: step(given), (stand_in,), 8)  # type: ignore[arg-type]
    if kernels:
        about["kernels"] = kernel_times(lambda: step(given))
    if row not in PEERS:
        report = compile_report()
        about |= {"graphs": report.graphs, "breaks": sum(report.breaks.values())}
        about |= {"recompiles": sum(report.recompiles.values()), "why": [*report.breaks, *report.recompiles]}
    return {**numbers, **about}


def kernel_times(step: Callable[[], Any], steps: int = 2) -> dict[str, float]:
    """Return the milliseconds a step spends in each kernel, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda one: -one.device_time_total)
    return {one.key[:120]: round(one.device_time_total / steps / 1000, 3) for one in found[:60]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["llamas"],
        help="`llamas`, `others`, names of shapes, or single rows (SHAPE:ROW)",
    )
    parser.add_argument("--rows", nargs="+", choices=[*PEERS, *OURS, *OWN])
    parser.add_argument("--at-once", type=int, default=6, help="processes that warm up together")
    parser.add_argument("--ready-within", type=float, help="seconds after which rows that still warm up are left out")
    parser.add_argument("--kernels", nargs="+", default=[], help="shapes whose steps are also taken apart into kernels")
    parser.add_argument("--liger", help="folder to import liger_kernel from")
    parser.add_argument("--one", help="used within")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"row": "huggingface", "ours": None, "peer": None, "limit": None, "why": "needs CUDA"}))
        return
    if options.liger:
        sys.path.insert(0, options.liger)
    if options.one:
        print(json.dumps(one(options.one, kernels=options.one.partition(":")[0] in options.kernels)), flush=True)
        # The others wait for this process's end: none of what Python and CUDA would tidy up is needed.
        os._exit(0)
    # Each process compiles alone on its few cores; the compiler's default is a pool of all cores for each of them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    groups = {"llamas": LLAMAS, "others": tuple(OTHERS)}
    shapes = [shape for given in options.shapes for shape in groups.get(given, (given,))]
    names = [name for shape in shapes for name in names_of(shape, options.rows)]
    missing = Counter(name.partition(":")[0] for name in names)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    given = ["--liger", options.liger] if options.liger else []
    given += ["--kernels", *options.kernels] if options.kernels else []
    for begin in range(0, len(names), options.at_once):
        some = names[begin : begin + options.at_once]
        for name, numbers in in_turn.measure(__file__, some, given, ready_within=options.ready_within):
            shape, row = name.split(":")
            found.setdefault(shape, {})[row] = numbers
            missing[shape] -= 1
            print(name, {key: value for key, value in numbers.items() if key != "kernels"}, file=sys.stderr, flush=True)
            # As soon as it is whole: a run that is cut short keeps what it measured.
            if not missing[shape]:
                print(json.dumps(line_of(shape, found[shape])), flush=True)


def names_of(shape: str, rows: list[str] | None) -> list[str]:
    """Return the rows of a shape as SHAPE:ROW; a shape that names its row is one row."""
    return [shape] if ":" in shape else [f"{shape}:{row}" for row in rows or rows_of(shape)]


def rows_of(shape: str) -> tuple[str, ...]:
    """The rows of a shape: of peers other than Llama's, those that can be the best."""
    if shape in LLAMAS:
        return (*OWN, *OURS, *PEERS)
    # Liger-Kernel's patches make what eager Accelerate computes faster and smaller.
    return ("bf16", "accelerate-inductor", "accelerate" if shape in _WITHOUT_LIGER else "liger")


def line_of(shape: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The JSON line of a shape."""

    def best(names: tuple[str, ...], key: str, choose: Callable[..., Any]) -> Any:
        known = [rows[name][key] for name in names if name in rows and rows[name].get(key)]
        return choose(known) if known else None

    return {
        "row": f"huggingface {shape}",
        "unit": "tokens/s",
        "ours": rows.get("bf16", {}).get("tokens_per_second"),
        "peer": best(PEERS, "tokens_per_second", max),
        "peer_peak_gib": best(PEERS, "peak_gib", min),
        "limit": None,
        "loss_gap": loss_gap(rows),
        "rows": rows,
    }


def loss_gap(rows: dict[str, dict[str, Any]]) -> float | None:
    """Return how far the first losses of rows lie apart; rows of our own `Transformer` start from other weights."""
    losses = [numbers["losses"] for row, numbers in rows.items() if row not in OWN and "losses" in numbers]
    return max((max(step) - min(step) for step in zip(*losses, strict=True)), default=None)


if __name__ == "__main__":
    main()
