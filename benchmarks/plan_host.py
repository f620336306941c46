"""Host time of eager blocks and optimizers: steps on so few tokens that the device is never waited for.

`python benchmarks/plan_host.py --out FILE.jsonl` writes one JSON line for each kind of block: microseconds of the host
for one block, forward, backward and optimizer step, as the difference of a deep and a shallow model. The planner's
numbers of launches are these over the seconds of a launch, which is measured too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

BASE = {
    "vocab_size": 1024,
    "dim": 256,
    "heads": 4,
    "mlp": "plain",
    "mlp_dim": 512,
    "activation": "gelu",
    "positions": "learned",
    "max_positions": 64,
}
ROTARY: dict[str, Any] = {**BASE, "positions": "rotary"}
LLAMA: dict[str, Any] = {**ROTARY, "mlp": "gated", "activation": "silu"}
MOE = {"experts": 8, "experts_per_token": 2, "expert_dim": 128}
LATENT = {"kv_rank": 64, "rope_dim": 32, "value_dim": 64, "q_rank": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": BASE,
    "layer norm": {**BASE, "norm": "layer"},
    "rotary": ROTARY,
    "llama": LLAMA,
    "grouped heads": {**LLAMA, "kv_heads": 2},
    "qk norm": {**LLAMA, "qk_norm": "head"},
    "post": {**LLAMA, "norm_placement": "post", "qk_norm": "full"},
    "latent": {**LLAMA, "head_dim": 96, "latent": LATENT},
    "moe": {**LLAMA, "moe": MOE},
    "shared": {**LLAMA, "moe": {**MOE, "shared_dim": 256}},
    "latent moe": {**LLAMA, "head_dim": 96, "latent": LATENT, "moe": MOE},
}
CASES: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"activations": "full"}, "adamw") for name in ("llama", "moe", "latent")),
    *((name, {}, "adamw") for name in SHAPES),
    ("llama", {}, "muon"),
    ("moe", {}, "muon"),
    *((name, {"activations": "selective"}, "adamw") for name in ("llama", "moe")),
    *((name, {"activations": "full"}, "adamw") for name in ("plain", "shared", "post")),
    *((name, {"activations": "selective"}, "adamw") for name in ("plain", "latent")),
    ("llama", {}, "lion"),
    ("llama", {}, "adamw8bit"),
    ("llama", {"precision": "bf16-pure"}, "adamw_split_bf16"),
]
DEPTHS = (3, 9)
"""Blocks of the shallow and of the deep model."""


def host_seconds(case: tuple[str, dict[str, Any], str], layers: int, steps: int) -> tuple[float, float, float, float]:
    """Return the fastest seconds of forward, backward, clipping and optimizer step of a model of so many blocks."""
    import torch

    from piledriver.accelerator import Accelerator
    from piledriver.core.config import from_mapping
    from piledriver.engine import Layout
    from piledriver.models import Transformer
    from piledriver.models.config import ModelConfig
    from piledriver.optim import OptimizerConfig, build_optimizer

    shape, given, kind = case
    cuda = torch.cuda.is_available()
    config = from_mapping(ModelConfig, {**SHAPES[shape], "layers": layers}, shape)
    layout = {"precision": "bf16", "compile": False, **given}
    if not cuda:
        # To try the script: a CPU may have no products in bf16, nor a compiler.
        config = replace(config, dim=32, head_dim=8, mlp_dim=32, vocab_size=64, latent=None)
        layout |= {"precision": "fp32", "compile": False}
    accelerator = Accelerator(layout=Layout(**layout))
    with torch.device("meta"):
        model = Transformer(config)
    optimizer = build_optimizer(model, OptimizerConfig(kind=kind, lr=1e-4))
    model, optimizer = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
    tokens = torch.randint(config.vocab_size, (1, 65 if cuda else 5), device=accelerator.device)

    def wait() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    best = [float("inf")] * 4
    for number in range(steps + 2):
        with accelerator.accumulate(model):
            marks = [wait()]
            sums = model(tokens[:, :-1], targets=tokens[:, 1:])
            marks.append(wait())
            accelerator.backward(sums.total / sums.tokens)
            marks.append(wait())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            marks.append(wait())
            optimizer.step()
            marks.append(wait())
            optimizer.zero_grad(set_to_none=True)
        if number >= 2:
            best = [min(known, b - a) for known, a, b in zip(best, marks, marks[1:], strict=False)]
    return best[0], best[1], best[2], best[3]


def census(seconds: float, only: list[str] | None = None, steps: int = 5) -> Iterator[dict[str, Any]]:
    """Yield the host's microseconds of a launch, then of each kind of block, as long as there is time."""
    import torch

    from piledriver.plan.hardware.host_rates import launch_seconds

    end = time.monotonic() + seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    launch_seconds(device)
    launch = launch_seconds(device)
    yield {"launch_us": round(1e6 * launch, 2), "device": str(device), "torch": torch.__version__}
    names = ("forward", "backward", "clip", "optimizer")
    for case in CASES:
        if (only and case[0] not in only) or time.monotonic() > end:
            continue
        try:
            few, many = (host_seconds(case, layers, steps) for layers in DEPTHS)
        except Exception as error:
            yield {"case": case, "error": f"{type(error).__name__}: {error}"[:300]}
            continue
        slopes = {n: 1e6 * (b - a) / (DEPTHS[1] - DEPTHS[0]) for n, a, b in zip(names, few, many, strict=True)}
        yield {
            "case": case,
            "block_us": {n: round(value, 1) for n, value in slopes.items()},
            "rest_us": {n: round(1e6 * a - DEPTHS[0] * slopes[n], 1) for n, a in zip(names, few, strict=True)},
            "launches": [round(1e-6 * slopes[n] / launch, 1) for n in names[:2]],
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", nargs="*", help="names of shapes")
    args = parser.parse_args()
    file = args.out.open("a", encoding="utf-8") if args.out else None
    for line in census(args.seconds, args.only, args.steps):
        text = json.dumps(line)
        print(text, flush=True)
        if file is not None:
            file.write(text + "\n")
            file.flush()


if __name__ == "__main__":
    main()
