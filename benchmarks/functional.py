"""What functional modules cost: on a CPU against `nn.Module`, on a GPU against flax in the same run.

    python benchmarks/functional.py                      # GPU rows where CUDA and flax are there, else the CPU row
    python benchmarks/functional.py --row cpu
    python benchmarks/functional.py --row gpu --shapes gpt2-124m --variants graph split

CPU: a 12-layer transformer's eager forward, `apply` against the same model in `torch.nn`, and our own time for one
module call. GPU: a whole train step (bf16 compute, fp32 parameters, clip at 1.0, AdamW), ours compiled against flax
with optax and cuDNN attention. Each side runs in a process of its own; all compile at once, then are timed in turn.
`chunked` is a loss that never holds all logits; `half` takes the gradients of the matrices' bf16 copies, which are what
is computed with anyway, so that they are stored and read in bf16 too. At 1.2B two sides fill a GPU of 140 GB while they
compile, which takes minutes the first time. One JSON line a row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import in_turn

_FIELDS = ("vocab_size", "dim", "depth", "heads", "kv_heads", "mlp_dim", "length", "batch")
SHAPES: dict[str, dict[str, int]] = {
    "gpt2-124m": dict(zip(_FIELDS, (50304, 768, 12, 12, 12, 2048, 1024, 32), strict=True)),
    "llama-1.2b": dict(zip(_FIELDS, (128256, 2048, 16, 32, 8, 8192, 2048, 8), strict=True)),
    # For a look at the code on any machine; no row of the scoreboard.
    "tiny": dict(zip(_FIELDS, (256, 64, 2, 4, 2, 128, 64, 4), strict=True)),
}
VARIANTS = ("split-half-chunked", "split-half", "split", "split-chunked", "graph", "split-tuned", "split-half-tuned")
WARMUP, WINDOWS, STEPS = 5, 5, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", choices=("cpu", "gpu"))
    parser.add_argument("--shapes", nargs="*", default=["gpt2-124m", "llama-1.2b"], choices=list(SHAPES))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS[:1]), choices=VARIANTS)
    parser.add_argument("--one", help="used within: one side of one row")
    args = parser.parse_args()
    if args.one:
        shape, side = args.one.split(":")
        measured = flax_side(SHAPES[shape]) if side == "flax" else our_side(SHAPES[shape], side)
        print(json.dumps(measured))
        return
    import torch

    row = args.row or ("gpu" if torch.cuda.is_available() and importlib.util.find_spec("flax") else "cpu")
    if row == "cpu":
        cpu_row()
        return
    for shape in args.shapes:
        gpu_row(shape, args.variants)


def gpu_row(shape: str, variants: list[str]) -> None:
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}
    sides = ["flax", *variants]
    found = in_turn.measure(__file__, [f"{shape}:{side}" for side in sides], [], rounds=WINDOWS)
    ours = {side: numbers for side, (_, numbers) in zip(sides, found, strict=True)}
    peer = ours.pop("flax")
    done = {name: one for name, one in ours.items() if "tokens_per_second" in one}
    best = max(done, key=lambda name: done[name]["tokens_per_second"]) if done else None
    our_speed = done[best]["tokens_per_second"] if best else None
    peer_speed = peer.get("tokens_per_second")
    print(
        json.dumps(
            {
                "row": f"functional-train-{shape}",
                "unit": "tokens/s",
                "ours": our_speed,
                "peer": peer_speed,
                "limit": "ours >= peer (flax linen + optax, jit, cuDNN attention), same run",
                "ratio": our_speed / peer_speed if our_speed and peer_speed else None,
                "variant": best,
                "all": {**ours, "flax": peer},
            }
        ),
        flush=True,
    )


def timed(step: Callable[[], Any], wait: Callable[[Any], None]) -> tuple[float, float]:
    """The seconds of a step, as the median of windows that wait once at their end, and of the first (it compiles)."""
    start = time.perf_counter()
    in_turn.with_patience(lambda: wait(step()))
    first = time.perf_counter() - start
    for _ in range(WARMUP):
        in_turn.with_patience(lambda: wait(step()))
    seconds = []
    for _ in range(WINDOWS):
        in_turn.my_turn()
        wait(step())
        start = time.perf_counter()
        for _ in range(STEPS - 1):
            step()
        wait(step())
        seconds.append((time.perf_counter() - start) / STEPS)
    return statistics.median(seconds), first


def our_side(shape: dict[str, int], variant: str) -> dict[str, Any]:
    import torch

    import piledriver.functional as fn
    from piledriver.models.loss import linear_cross_entropy

    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {name: value for name, value in shape.items() if name not in ("batch", "length")}
    model = fn.Decoder(**sizes, fuse_projections=True, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape["vocab_size"], (shape["batch"], shape["length"] + 1), generator=generator).to(device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    variables = model.init(fn.key(0), inputs)
    optimizer = fn.chain(fn.clip_by_global_norm(1.0), fn.adamw(3e-4, 0.9, 0.95, weight_decay=0.1, mask=fn.not_vectors))
    holder: dict[str, Any] = {"state": fn.TrainState.create(model.apply, variables, optimizer)}
    options = {"coordinate_descent_tuning": True} if variant.endswith("tuned") else None

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        if "chunked" not in variant:
            return fn.cross_entropy(model.apply({"params": params}, inputs), targets)
        features = model.apply({"params": params}, inputs, features_only=True)
        sums = linear_cross_entropy(features, params["embed"]["embedding"], targets)
        return sums.total / sums.tokens

    if variant == "graph":

        def whole_step(state: fn.TrainState, inputs: Any, targets: Any) -> Any:
            value, grads = fn.value_and_grad(loss)(state.params, inputs, targets)
            return state.apply_gradients(grads), value

        compiled = fn.jit(whole_step, donate=True, options=options)

        def step() -> Any:
            holder["state"], value = compiled(holder["state"], inputs, targets)
            return value
    else:
        both = fn.value_and_grad(fn.jit(loss, options=options))

        half = "half" in variant

        def with_copies(state: fn.TrainState) -> tuple[Any, ...]:
            """With what the next step computes with: written while the new parameters are at hand."""
            copies = fn.tree_map(lambda p: p.bfloat16() if p.ndim > 1 else p.clone(), state.params) if half else None
            return state, copies

        def updated(carried: tuple[Any, ...], grads: Any) -> tuple[Any, ...]:
            return (with_copies(carried[0].apply_gradients(grads)),)

        update = fn.jit(updated, donate=True, options=options)
        holder["carried"] = with_copies(holder.pop("state"))

        def step() -> Any:
            state, copies = holder["carried"]
            value, grads = both(copies if half else state.params, inputs, targets)
            (holder["carried"],) = update(holder["carried"], grads)
            return value

    def wait(_: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    seconds, first = timed(step, wait)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {
        "tokens_per_second": round(shape["batch"] * shape["length"] / seconds),
        "milliseconds": seconds * 1e3,
        "first_step_s": round(first, 1),
        "peak_gib": peak,
        "loss": float(step()),
        "torch": torch.__version__,
    }


def flax_side(shape: dict[str, int]) -> dict[str, Any]:
    import flax
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    on_gpu = jax.default_backend() == "gpu"
    compute = jnp.bfloat16
    heads, kv_heads, head_dim = shape["heads"], shape["kv_heads"], shape["dim"] // shape["heads"]
    init = nn.initializers.normal(0.02)

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        wide = x.astype(jnp.float32)
        first, second = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
        return (wide * cos + turned * sin).astype(x.dtype)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, cos: Any, sin: Any) -> Any:
            def dense(features: Any, name: str, axis: Any = -1) -> Any:
                return nn.DenseGeneral(features, axis=axis, use_bias=False, dtype=compute, kernel_init=init, name=name)

            y = nn.RMSNorm(epsilon=1e-5, dtype=compute, name="attention_norm")(x)
            query = rotate(dense((heads, head_dim), "query")(y), cos, sin)
            key = rotate(dense((kv_heads, head_dim), "key")(y), cos, sin)
            value = dense((kv_heads, head_dim), "value")(y)
            out = jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation="cudnn" if on_gpu else "xla"
            )
            x = x + dense(shape["dim"], "out", (-2, -1))(out)
            y = nn.RMSNorm(epsilon=1e-5, dtype=compute, name="mlp_norm")(x)
            hidden = nn.silu(dense(shape["mlp_dim"], "gate")(y)) * dense(shape["mlp_dim"], "up")(y)
            return x + dense(shape["dim"], "down")(hidden)

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            embed = nn.Embed(shape["vocab_size"], shape["dim"], dtype=compute, embedding_init=init, name="embed")
            x = embed(tokens)
            rates = 1.0 / 10000.0 ** (jnp.arange(0, head_dim, 2) / head_dim)
            angles = jnp.arange(tokens.shape[1])[:, None] * rates
            angles = jnp.concatenate([angles, angles], axis=-1)[None, :, None, :]
            cos, sin = jnp.cos(angles), jnp.sin(angles)
            for i in range(shape["depth"]):
                x = Block(name=f"layers_{i}")(x, cos, sin)
            return embed.attend(nn.RMSNorm(epsilon=1e-5, dtype=compute, name="norm")(x))

    model = Decoder()
    rows = np.random.default_rng(0).integers(shape["vocab_size"], size=(shape["batch"], shape["length"] + 1))
    tokens = jnp.asarray(rows, jnp.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    params = jax.jit(model.init)(jax.random.key(0), inputs[:1])["params"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(3e-4, 0.9, 0.95, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)),
    )

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        logits = model.apply({"params": params}, inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def train_step(params: Any, opt_state: Any, inputs: Any, targets: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    compiled = jax.jit(train_step, donate_argnums=(0, 1))
    holder = {"params": params, "opt_state": optimizer.init(params)}

    def step() -> Any:
        holder["params"], holder["opt_state"], value = compiled(holder["params"], holder["opt_state"], inputs, targets)
        return value

    seconds, first = timed(step, lambda value: jax.block_until_ready((value, holder["params"])))
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "tokens_per_second": round(shape["batch"] * shape["length"] / seconds),
        "milliseconds": seconds * 1e3,
        "first_step_s": round(first, 1),
        "peak_gib": stats["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in stats else None,
        "loss": float(step()),
        "flax": flax.__version__,
        "jax": jax.__version__,
    }


def cpu_row() -> None:
    import torch
    import torch.nn.functional as F
    from torch import nn

    import piledriver.functional as fn

    torch.set_num_threads(1)
    dim, depth, heads, vocab, batch, length = 256, 12, 4, 1024, 4, 128

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
            self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
            self.gate, self.up = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, 4 * dim, bias=False)
            self.down = nn.Linear(4 * dim, dim, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            y = self.attention_norm(x)
            q, k, v = (layer(y).unflatten(-1, (heads, -1)) for layer in (self.query, self.key, self.value))
            q, k = fn.rotate(q, cos, sin).transpose(1, 2), fn.rotate(k, cos, sin).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
            x = x + self.out(out.transpose(1, 2).flatten(2))
            y = self.mlp_norm(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(vocab, dim), nn.RMSNorm(dim, 1e-5)
            self.blocks = nn.ModuleList(Block() for _ in range(depth))

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            cos, sin = fn.rotary_tables(torch.arange(tokens.shape[1]), dim // heads)
            for block in self.blocks:
                x = block(x, cos, sin)
            return F.linear(self.norm(x), self.embed.weight)

    class Leaf(fn.Module):
        features: int = 4

        def __call__(self, x: Any) -> Any:
            return x

    class Many(fn.Module):
        def __call__(self, x: Any) -> Any:
            for i in range(1000):
                x = self.child(f"leaf_{i}", Leaf())(x)
            return x

    tokens = torch.randint(vocab, (batch, length))
    short = tokens[:1, :16]
    net, model = Net(), fn.Decoder(vocab, dim, depth, heads, 4 * dim)
    variables = model.init(fn.key(0), tokens)
    with torch.no_grad():
        large = paired(lambda: net(tokens), lambda: model.apply(variables, tokens), 15)
        small = paired(lambda: net(short), lambda: model.apply(variables, short), 40)
        calls = min(elapsed(lambda: Many().apply({}, short)) for _ in range(10)) * 1e6 / 1000
    print(
        json.dumps(
            {
                "row": "functional-eager-overhead",
                "unit": "ms forward, 12 layers, dim 256, 4 x 128 tokens, one thread",
                "ours": large[1] * 1e3,
                "peer": large[0] * 1e3,
                "limit": "ratio <= 1.3, own time for a module call <= 50 us",
                "ratio": large[2],
                "ratio_at_16_tokens": small[2],
                "microseconds_per_module_call": calls,
            }
        )
    )


def paired(theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both, measured in turn, and the median of the ratios of neighbours."""
    theirs(), ours()
    times = [(elapsed(theirs), elapsed(ours)) for _ in range(rounds)]
    return (
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(b / a for a, b in times),
    )


def elapsed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
