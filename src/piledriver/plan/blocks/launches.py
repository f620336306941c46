"""What a block costs the host, in launches of a kernel: eager blocks wait for it where the device is faster.

An operator of an eager forward costs about two launches with the Python around it, one of a backward a little less. The
numbers come from steps on so few tokens that the device is never waited for (`benchmarks/plan_host.py`), and from steps
of real blocks, in which host and device take turns at being the slower one.
"""

from __future__ import annotations

from typing import NamedTuple

from piledriver.plan.blocks.fp8 import fp8_operators
from piledriver.plan.blocks.widths import Widths


class HostWork(NamedTuple):
    """What a part of an eager block costs the host."""

    forward: float
    """Launches of the forward."""
    backward: float
    operators: float
    """Operators that the forward dispatches."""
    saved: float
    """Tensors that the forward saves for the backward."""


# A block with learned positions and a plain MLP; what rotary positions, gates, norms of queries and keys, routing, a
# shared expert and latent attention add.
_PLAIN = HostWork(74, 112, 40, 22)
_ROTARY, _GATE, _QK_NORM = HostWork(52, 33, 28, 8), HostWork(16, 16, 4, 2), HostWork(16, 20, 6, 8)
_ROUTING, _SHARED, _LATENT = HostWork(100, 80, 56, 16), HostWork(33, 38, 16, 7), HostWork(54, 48, 24, 14)
# Launches of a block of other software with fused operators; of a compiled one, with routing, with latent attention.
_FUSED_EAGER, _COMPILED, _COMPILED_ROUTING, _COMPILED_LATENT = (45, 83), (36, 64), (24, 36), (5, 10)
# What an fp8 linear layer and a gated MLP in fp8 add; compilers call both as they are.
_FP8_LINEAR, _FP8_MLP = HostWork(50, 53, 0, 0), HostWork(75, 100, 0, 0)
# Checkpointing runs Python around a block and for each tensor that it saves, in its forward and in its recomputation.
_CHECKPOINT, _SAVED_TENSOR = (31, 65), (1.13, 1.76)
# Selective checkpointing also runs Python for each operator.
_SELECTED_OPERATOR = (2.4, 1.4)


def block_launches(w: Widths) -> tuple[float, float]:
    """Return the host's work for the forward and for the backward of a block, recomputation included."""
    compiled, policy = w.setting.compiled, w.setting.activations
    if not compiled and w.setting.traits.name == "piledriver":
        return _eager_launches(block_work(w), policy)
    found = [_COMPILED if compiled else _FUSED_EAGER, *((one.forward, one.backward) for one in _fp8_work(w))]
    if compiled and w.moe is not None:
        found.append(_COMPILED_ROUTING)
    if compiled and w.config.latent is not None:
        found.append(_COMPILED_LATENT)
    forward, backward = (float(sum(column)) for column in zip(*found, strict=True))
    return forward, backward + (forward if policy == "full" else 0.0)


def block_work(w: Widths) -> HostWork:
    """Return the host's work for an eager block of this package that keeps all activations."""
    config = w.config
    there = (
        (_PLAIN, True),
        (_ROTARY, config.positions == "rotary"),
        (_GATE, w.gated),
        (_QK_NORM, config.qk_norm != "none"),
        (_ROUTING, w.moe is not None),
        (_SHARED, bool(w.shared)),
        (_LATENT, config.latent is not None),
    )
    parts = [*(part for part, has in there if has), *_fp8_work(w)]
    return HostWork(*map(sum, zip(*parts, strict=True)))


def _fp8_work(w: Widths) -> list[HostWork]:
    """Return the host's work for the fp8 operators of a block of this package."""
    if w.setting.traits.name != "piledriver":
        return []
    linears, fused = fp8_operators(w)
    return linears * [_FP8_LINEAR] + fused * [_FP8_MLP]


def _eager_launches(work: HostWork, policy: str) -> tuple[float, float]:
    """Return the launches of an eager forward and backward under an activation policy."""
    if policy not in ("full", "selective"):
        return work.forward, work.backward
    there, back = (once + each * work.saved for once, each in zip(_CHECKPOINT, _SAVED_TENSOR, strict=True))
    if policy == "selective":
        there += _SELECTED_OPERATOR[0] * work.operators
        back += _SELECTED_OPERATOR[1] * work.operators
    return work.forward + there, work.backward + work.forward + back
