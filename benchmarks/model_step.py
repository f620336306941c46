"""A plain training loop with our model against a hand-written torch model, in the same run.

    python benchmarks/model_step.py                                   # CUDA: both shapes; CPU: a tiny one
    python benchmarks/model_step.py --shape gpt2-124m --compile block --loss plain
    python benchmarks/model_step.py --shape llama-1.2b --weights bf16 --profile

Random tokens, AdamW (fused), clipping at 1.0, bf16 compute on a GPU, fp32 on a CPU. Needs torch, numpy, pyyaml and
safetensors only. One JSON line per shape: `ours` and `peer` in tokens per second, `limit` what the measured peak of the
matrix units would allow.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver.models import ModelConfig, Transformer
from piledriver.models.model_size import flops_per_token
from piledriver.models.presets import preset
from piledriver.optim import OptimizerConfig, build_optimizer

SHAPES = {"gpt2-124m": (32, 1024), "llama-1.2b": (8, 2048), "tiny": (8, 256)}
PEAK_FLOPS = 774e12  # bf16, one H200, measured with 8192 cubed


class HandAttention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.q = nn.Linear(c.dim, c.heads * c.head_dim, bias=False)
        self.k = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, self.c.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.c.heads != self.c.kv_heads)
        return self.o(out.transpose(1, 2).reshape(b, t, -1))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class HandBlock(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(c.dim, eps=1e-5), nn.RMSNorm(c.dim, eps=1e-5)
        self.attention = HandAttention(c)
        self.gate, self.up = (nn.Linear(c.dim, c.mlp_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(c.mlp_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class HandModel(nn.Module):
    """What one writes by hand in an hour: separate projections, tied output, cross-entropy of all logits."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList([HandBlock(c) for _ in range(c.layers)])
        self.norm = nn.RMSNorm(c.dim, eps=1e-5)
        frequencies = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angles = torch.outer(torch.arange(c.max_positions).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.flatten())


def our_step(config: ModelConfig, device: str, options: argparse.Namespace) -> Callable[[Tensor, Tensor], Tensor]:
    model = Transformer(config).to(device)
    if options.weights == "bf16":
        model.to(torch.bfloat16)
    elif device == "cuda":
        model.compute_dtype = torch.bfloat16
    model.chunk_tokens = 0 if options.loss == "plain" else options.chunk_tokens
    if options.compile == "block":
        for block in model.blocks.values():
            block.compile(mode=options.mode)
    elif options.compile == "model":
        model.compile(fullgraph=True, mode=options.mode)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        sums = model(tokens, targets)
        return sums.total / sums.tokens

    optimizer = build_optimizer(model, OptimizerConfig(kind=options.optimizer, lr=3e-4))
    return step_of(model, optimizer, loss)


def hand_step(config: ModelConfig, device: str, options: argparse.Namespace) -> Callable[[Tensor, Tensor], Tensor]:
    model = HandModel(config).to(device)
    if options.compile != "none":
        model.compile(mode=options.mode)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return model(tokens, targets)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return step_of(model, optimizer, loss)


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    parameters = list(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def batch_of(config: ModelConfig, batch: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(config.vocab_size, (batch, length + 1), generator=generator).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def on_gpu(step: Callable[[Tensor, Tensor], Tensor], data: tuple[Tensor, Tensor], options: argparse.Namespace) -> dict:
    """Median step by CUDA events, and the peak memory of the steps measured."""
    losses = [step(*data).item() for _ in range(options.warmup)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(options.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step(*data)
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"milliseconds": statistics.median(times), "peak_gib": round(peak, 2), "first_losses": losses[:2]}


def profile(step: Callable[[Tensor, Tensor], Tensor], data: tuple[Tensor, Tensor]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(3):
            step(*data)
        torch.cuda.synchronize()
    table = trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)
    print(table, file=sys.stderr)


def cuda_row(shape: str, options: argparse.Namespace) -> dict:
    batch, length = SHAPES[shape]
    config = preset(shape)
    data = batch_of(config, options.batch or batch, length, "cuda")
    tokens = data[0].numel()
    found: dict[str, dict] = {}
    for name, make in (("ours", our_step), ("peer", hand_step)):
        if name in options.only.split(","):
            step = make(config, "cuda", options)
            found[name] = on_gpu(step, data, options)
            if options.profile:
                profile(step, data)
            del step
            gc.collect()
            torch.compiler.reset()
            torch.cuda.empty_cache()
    flops = flops_per_token(config, length)
    row = {
        "row": f"model_step {shape}",
        "unit": "tokens/s",
        "settings": {
            key: getattr(options, key)
            for key in ("compile", "loss", "weights", "optimizer", "mode", "batch", "chunk_tokens")
        },
        "limit": round(PEAK_FLOPS / flops),
    }
    for name, numbers in found.items():
        rate = tokens / numbers["milliseconds"] * 1000
        row |= {name: round(rate), f"{name}_teraflops": round(rate * flops / 1e12, 1)}
        row |= {f"{name}_{key}": value for key, value in numbers.items()}
    if len(found) == 2:
        row["ratio"] = round(row["ours"] / row["peer"], 3)
    return row


def cpu_row(shape: str, options: argparse.Namespace) -> dict:
    """Both steps in turn, so that whatever else the machine does falls on both alike."""
    batch, length = SHAPES[shape]
    config = preset(shape)
    data = batch_of(config, options.batch or batch, length, "cpu")
    steps = {"ours": our_step(config, "cpu", options), "peer": hand_step(config, "cpu", options)}
    wall: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    for turn_number in range(options.warmup + options.steps):
        for name, step in steps.items():
            begin, begin_busy = time.perf_counter(), time.process_time()
            step(*data)
            if turn_number >= options.warmup:
                wall[name].append(time.perf_counter() - begin)
                busy[name].append(time.process_time() - begin_busy)
    seconds = {name: statistics.median(found) for name, found in wall.items()}
    busy_seconds = {name: statistics.median(found) for name, found in busy.items()}
    return {
        "row": f"model_step {shape} cpu",
        "unit": "tokens/s",
        "settings": {key: getattr(options, key) for key in ("compile", "loss", "optimizer", "batch")},
        **{name: round(data[0].numel() / value) for name, value in seconds.items()},
        "limit": None,
        "ratio": round(seconds["peer"] / seconds["ours"], 3),
        "ratio_cpu_seconds": round(busy_seconds["peer"] / busy_seconds["ours"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append", help="default: all that fit the device")
    parser.add_argument("--compile", choices=["none", "block", "model"], help="default: model on a GPU, none on a CPU")
    parser.add_argument("--loss", choices=["chunked", "plain"], default="chunked")
    parser.add_argument("--chunk-tokens", type=int, help="tokens per chunk of the loss")
    parser.add_argument("--weights", choices=["fp32", "bf16"], default="fp32", help="dtype of our parameters")
    parser.add_argument("--optimizer", default="adamw", help="ours: adamw, muon, lion, adamw8bit or adamw_bf16")
    parser.add_argument("--mode", help="mode of torch.compile, such as max-autotune-no-cudagraphs")
    parser.add_argument("--only", default="ours,peer", help="which of the two to run")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the kernels of three steps (GPU)")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    options.compile = options.compile or ("model" if cuda else "none")
    torch.set_float32_matmul_precision("high")
    for shape in options.shape or (["gpt2-124m", "llama-1.2b"] if cuda else ["tiny"]):
        print(json.dumps(cuda_row(shape, options) if cuda else cpu_row(shape, options)), flush=True)


if __name__ == "__main__":
    main()
