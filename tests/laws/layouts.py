"""The rows of the parity matrix: add one for each layout that must train like one process.

`tests/laws/test_layouts.py` runs each row for 3 steps through `Accelerator(layout=...)` and compares the loss of every
step and the final weights with one process; then it loads the checkpoint that the row before saved at step 2 and goes
on from there. To run some of them: LAYOUTS="zero3 zero3-plain" pytest tests/laws/test_layouts.py.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

from piledriver.engine import Layout, Offload


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout on some processes, and how near to one process it must stay."""

    name: str
    layout: Layout
    processes: int = 2
    model: str = "transformer"
    """transformer, plain (a user's own stack), tied (tied embeddings), deep (tied, twice as many blocks), moe, latent
    (attention and experts of DeepSeek), sinks (those of gpt-oss), shared-norm (ALiBi, parallel, biased output), llama
    or mixtral (modules of transformers): see `test_layouts.make_model`."""
    optimizer: str = "adamw"
    """adamw, muon, lion, compact (8-bit states): see `test_layouts.make_optimizer`."""
    loss: float = 2e-5
    """How far a loss may be off, relatively."""
    weight: float = 2e-4
    """How far a final weight may be off, absolutely."""
    accumulate: int = 1
    """Batches per step."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """More arguments of the Accelerator."""
    moves: bool = True
    """Whether it also goes on from the checkpoint of the row before (of the same model and optimizer)."""


ROWS: list[Row] = [
    Row(name="zero0", layout=Layout()),
    Row(name="zero1", layout=Layout(zero=1)),
    Row(name="zero2", layout=Layout(zero=2)),
    Row(name="zero3", layout=Layout(zero=3)),
    Row(name="zero3-prefetch", layout=Layout(zero=3, prefetch=2), model="deep"),
    Row(name="zero0-plain", layout=Layout(), model="plain"),
    Row(name="zero1-plain", layout=Layout(zero=1), model="plain"),
    Row(name="zero2-plain", layout=Layout(zero=2), model="plain"),
    Row(name="zero3-plain", layout=Layout(zero=3), model="plain"),
    Row(name="zero1-tied", layout=Layout(zero=1), model="tied"),
    Row(name="zero2-accumulate", layout=Layout(zero=2), model="tied", accumulate=2),
    Row(name="zero3-accumulate", layout=Layout(zero=3), model="tied", accumulate=2),
    Row(name="zero1-muon", layout=Layout(zero=1), optimizer="muon"),
    Row(name="zero2-lion", layout=Layout(zero=2), optimizer="lion", weight=2e-3),
    Row(name="zero1-moe", layout=Layout(zero=1), model="moe"),
    Row(name="zero3-moe", layout=Layout(zero=3), model="moe"),
    Row(name="zero1-hybrid", layout=Layout(zero=1, dp_replicate=2), processes=4),
    Row(name="zero2-hybrid", layout=Layout(zero=2, dp_replicate=2), processes=4),
    Row(name="zero3-hybrid", layout=Layout(zero=3, dp_replicate=2), processes=4),
    Row(name="zero3-on-4", layout=Layout(zero=3), processes=4, model="plain"),
]

ROWS += [
    Row(name="tp", layout=Layout(tp=2)),
    Row(name="tp-tied", layout=Layout(tp=2, sequence_parallel=False), model="tied"),
    Row(name="pp", layout=Layout(pp=2, microbatches=2)),
    Row(name="pp-uneven", layout=Layout(pp=2, microbatches=2, stage_blocks=(1, 3)), model="deep"),
    Row(name="pp-tied", layout=Layout(pp=2, microbatches=4, schedule="gpipe"), model="tied"),
    Row(name="ep", layout=Layout(ep=2), model="moe"),
    Row(name="ep-zero3", layout=Layout(ep=2, zero=3), model="moe"),
    Row(name="zero3-tp", layout=Layout(zero=3, tp=2), processes=4),
    Row(name="zero1-tp", layout=Layout(zero=1, tp=2), processes=4),
    Row(name="zero2-pp", layout=Layout(zero=2, pp=2, microbatches=2), processes=4),
    Row(name="zero3-pp", layout=Layout(zero=3, pp=2, microbatches=2), processes=4),
    Row(name="tp-pp", layout=Layout(tp=2, pp=2, microbatches=2), processes=4),
]

ROWS += [
    Row(name="tp-moe", layout=Layout(tp=2, loss_parallel=False), model="moe"),
    Row(name="tp-plain", layout=Layout(tp=2), model="plain"),
    Row(name="cp", layout=Layout(cp=2)),
    Row(name="cp-heads", layout=Layout(cp=2, cp_method="all-to-all"), model="tied"),
    Row(name="cp-zero3", layout=Layout(cp=2, zero=3), accumulate=2),
    Row(name="cp-zero1", layout=Layout(cp=2, zero=1)),
    Row(name="cp-ep", layout=Layout(cp=2, ep=2), model="moe"),
    Row(name="tp-on-4", layout=Layout(tp=2, dp_replicate=2), processes=4),
    Row(name="zero3-tp-plain", layout=Layout(zero=3, tp=2), processes=4, model="plain"),
    Row(name="cp-on-4", layout=Layout(cp=4), processes=4),
    Row(name="cp-zero3-on-4", layout=Layout(cp=2, zero=3, cp_method="all-to-all"), processes=4),
    Row(name="cp-tp", layout=Layout(cp=2, tp=2), processes=4),
    Row(name="ep-on-4", layout=Layout(ep=4), processes=4, model="moe"),
    Row(name="ep-zero3-on-4", layout=Layout(ep=2, zero=3), processes=4, model="moe"),
    Row(name="ep-tp", layout=Layout(ep=2, tp=2), processes=4, model="moe"),
    Row(name="cp-pp", layout=Layout(cp=2, pp=2, microbatches=2), processes=4),
]

ROWS += [
    Row(name="pp-zbv", layout=Layout(pp=2, microbatches=4, schedule="zbv"), model="deep"),
    Row(
        name="zero3-pp-interleaved",
        layout=Layout(zero=3, pp=2, microbatches=2, schedule="interleaved-1f1b"),
        processes=4,
        model="deep",
    ),
]

ROWS += [
    Row(name="full-offload", layout=Layout(activations="full", offload="parameters"), processes=1),
    Row(name="zero3-full", layout=Layout(zero=3, activations="full", activation_offload=True)),
    Row(name="zero3-selective", layout=Layout(zero=3, activations="selective"), model="tied"),
    Row(name="zero1-budget", layout=Layout(zero=1, activations="budget")),
    Row(name="tp-selective", layout=Layout(tp=2, activations="selective")),
    Row(
        name="pp-full",
        layout=Layout(pp=2, microbatches=2, activations="full", activation_every=2),
        model="deep",
    ),
    Row(name="zero3-offload", layout=Layout(zero=3, offload="optimizer"), accumulate=2),
    Row(name="zero3-offload-parameters", layout=Layout(zero=3, offload="parameters"), model="tied"),
    Row(name="zero3-8bit", layout=Layout(zero=3), optimizer="compact", loss=2e-3, weight=5e-2),
    # The tolerance of bf16: 8 bits, added up over the blocks and steps.
    Row(name="zero2-bf16", layout=Layout(zero=2, precision="bf16"), loss=5e-3, weight=2e-2),
    Row(name="zero3-bf16", layout=Layout(zero=3, precision="bf16"), model="plain", loss=5e-3, weight=2e-2),
    # Others have no loss scale to go on from.
    Row(name="zero1-fp16", layout=Layout(zero=1, precision="fp16"), loss=5e-3, weight=2e-2, moves=False),
    Row(name="zero2-pure", layout=Layout(zero=2, precision="bf16-pure"), loss=2e-2, weight=5e-2),
    Row(name="zero3-pure", layout=Layout(zero=3, precision="bf16-pure"), loss=2e-2, weight=5e-2),
]

# Masters and states of each stage in files, then everything. With ep the experts of a rank are a shard group alone.
ON_DISK = Offload(optimizer="disk", parameters="disk", folder=tempfile.gettempdir(), buffer_bytes=1 << 16)
ROWS += [
    Row(
        name="pp-disk",
        layout=Layout(pp=2, microbatches=2, offload=Offload(optimizer="disk", folder=tempfile.gettempdir())),
        model="tied",
        accumulate=2,
    ),
    Row(name="cp-zero1-disk", layout=Layout(cp=2, zero=1, offload=ON_DISK)),
    Row(name="ep-zero3-disk", layout=Layout(ep=2, zero=3, activations="full", offload=ON_DISK), model="moe"),
]

ROWS += [
    Row(name="zero2-tp", layout=Layout(zero=2, tp=2), processes=4, model="tied"),
    Row(name="zero3-cp-tp", layout=Layout(zero=3, cp=2, tp=2), processes=4),
    Row(name="zero3-ep-tp", layout=Layout(zero=3, ep=2, tp=2), processes=4, model="moe"),
    Row(name="zero3-pp-ep", layout=Layout(zero=3, pp=2, ep=2, microbatches=2), processes=4, model="moe"),
]

ROWS += [
    Row(name="zero3-latent", layout=Layout(zero=3, activations="full"), model="latent"),
    Row(name="tp-latent", layout=Layout(tp=2), model="latent"),
    Row(name="pp-latent", layout=Layout(pp=2, microbatches=2), model="latent"),
    Row(name="ep-sinks", layout=Layout(ep=2), model="sinks"),
    Row(name="cp-sinks", layout=Layout(cp=2, cp_method="all-to-all"), model="sinks"),
    Row(name="tp-shared-norm", layout=Layout(tp=2), model="shared-norm"),
    Row(name="pp-shared-norm", layout=Layout(pp=2, microbatches=2, activations="selective"), model="shared-norm"),
]

# Modules of transformers, fused as on a GPU: their own forwards, losses and names of parameters.
ROWS += [
    Row(name="zero0-llama", layout=Layout(fuse=True), model="llama"),
    Row(name="zero1-llama", layout=Layout(zero=1, fuse=True), model="llama"),
    Row(name="zero2-llama", layout=Layout(zero=2, fuse=True), model="llama", accumulate=2),
    Row(name="zero3-llama", layout=Layout(zero=3, fuse=True), model="llama"),
    Row(name="tp-llama", layout=Layout(tp=2, fuse=True), model="llama"),
    Row(name="cp-llama", layout=Layout(cp=2, fuse=True), model="llama"),
    Row(name="pp-llama", layout=Layout(pp=2, microbatches=2, fuse=True), model="llama"),
    Row(name="cp-mixtral", layout=Layout(cp=2, fuse=True), model="mixtral"),
    Row(name="pp-mixtral", layout=Layout(pp=2, microbatches=2, fuse=True), model="mixtral"),
    Row(name="cp-ep-mixtral", layout=Layout(cp=2, ep=2, fuse=True), model="mixtral"),
    Row(name="zero3-mixtral", layout=Layout(zero=3, fuse=True), model="mixtral"),
    Row(name="ep-mixtral", layout=Layout(ep=2, fuse=True), model="mixtral"),
    Row(name="ep-zero3-mixtral", layout=Layout(ep=2, zero=3, fuse=True), model="mixtral"),
]
