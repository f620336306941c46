"""The host's work for one block, in launches of a kernel: eager blocks wait for it where the device is faster.

An operator of an eager forward costs several launches with the Python around it, one of a backward about one. The
numbers come from steps on so few tokens that the device is never waited for (`benchmarks/plan_host.py`), and from steps
of real blocks, in which host and device take turns at being the slower one.
"""

from __future__ import annotations

from piledriver.plan.blocks.widths import Widths

# Forward and backward of a block with learned positions and a plain MLP; of other software with fused operators; of a
# compiled block.
_EAGER, _FUSED_EAGER, _COMPILED = (74, 112), (45, 83), (36, 64)
# Further ones of rotary positions, gates, routing, a shared expert, latent attention, norms of queries and keys.
_ROTARY, _GATE, _QK_NORM = (52, 33), (16, 16), (16, 20)
_ROUTING, _COMPILED_ROUTING = (100, 80), (24, 36)
_SHARED = (78, 65)
_LATENT, _COMPILED_LATENT = (39, 33), (5, 10)
# Selective checkpointing runs Python for each operator of the forward, and again when it is recomputed.
_SELECTIVE, _SELECTIVE_AGAIN = 175, 1.4
# A checkpointed forward runs Python around it, and when it is recomputed also for each tensor that it keeps.
_CHECKPOINT, _AGAIN = 70, 1.8


def block_launches(w: Widths) -> tuple[float, float]:
    """Return the host's work for the forward and for the backward of a block, recomputation included."""
    compiled, policy = w.setting.compiled, w.setting.activations
    ours = w.setting.traits.name == "piledriver"
    if not compiled and not ours:
        found = [_FUSED_EAGER]
    elif compiled:
        found = [_COMPILED]
        if w.moe is not None:
            found.append(_COMPILED_ROUTING)
        if w.config.latent is not None:
            found.append(_COMPILED_LATENT)
    else:
        found = [_EAGER, *_parts(w)]
    forward, backward = (float(sum(one[index] for one in found)) for index in range(2))
    if policy == "full":
        if compiled or not ours:
            return forward, backward + forward
        return forward + _CHECKPOINT, backward + _AGAIN * forward
    if policy == "selective" and not compiled and ours:
        forward += _SELECTIVE
        return forward, backward + _SELECTIVE_AGAIN * forward
    return forward, backward


def _parts(w: Widths) -> list[tuple[int, int]]:
    """Return what an eager block has beyond the plainest."""
    config = w.config
    there = {
        _ROTARY: config.positions == "rotary",
        _GATE: w.gated,
        _QK_NORM: config.qk_norm != "none",
        _ROUTING: w.moe is not None,
        _SHARED: bool(w.shared),
        _LATENT: config.latent is not None,
    }
    return [one for one, has in there.items() if has]
