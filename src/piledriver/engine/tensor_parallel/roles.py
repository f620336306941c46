"""Infer how to shard each layer of a third-party model, from its modules and their names.

Hugging Face models provide a `tp_plan`; for others the names of the projections decide, or a pair of linear layers with
only an elementwise function between them. Other layers stay replicated.
"""

from __future__ import annotations

import fnmatch
from enum import Enum
from typing import Any

from torch import nn

from piledriver.engine.errors import LayoutError


class Role(Enum):
    """How a layer is sharded; the first words are torch's."""

    COLWISE = "colwise"
    """Each rank computes a shard of the outputs, which the next layers use."""
    ROWWISE = "rowwise"
    """Each rank reads a shard of the inputs; outputs are all-reduced."""
    COLWISE_GATHERED = "colwise gathered"
    """As COLWISE, with outputs gathered."""
    ROWWISE_SCATTERED = "rowwise scattered"
    """As ROWWISE, from replicated inputs."""
    VOCAB = "vocab"
    """An embedding sharded by rows."""
    HEAD = "head"
    """The output layer: as COLWISE_GATHERED, or sharded logits for a vocabulary-parallel loss."""
    HEAD_NORM = "head norm"
    """A norm of single heads: replicated, applied to this rank's heads."""


_STYLES = {
    "colwise": Role.COLWISE,
    "rowwise": Role.ROWWISE,
    "colwise_gather_output": Role.COLWISE_GATHERED,
    "colwise_rep": Role.COLWISE_GATHERED,
    "rowwise_split_input": Role.ROWWISE_SCATTERED,
    "rowwise_rep": Role.ROWWISE_SCATTERED,
    "embedding_rowwise": Role.VOCAB,
    "replicated_with_grad_allreduce": Role.HEAD_NORM,
}
"""The names that `transformers` uses."""

_QUERY, _KEY, _VALUE = (
    {"q_proj", "query", "wq", "q_lin", "q"},
    {"k_proj", "key", "wk", "k_lin", "k"},
    {"v_proj", "value", "wv", "v_lin", "v"},
)
_FUSED = {"c_attn", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "qkv", "in_proj", "attn_qkv"}
_ATTENTION_OUT = {"o_proj", "out_proj", "dense", "c_proj", "wo", "out_lin", "proj", "out", "o"}
_UP = {
    *("gate_proj", "up_proj", "fc1", "c_fc", "w1", "w3", "dense_h_to_4h", "fc_in", "lin1", "linear1", "up", "gate"),
    *("wi", "wi_0", "wi_1"),
}
_FUSED_UP = {"gate_up_proj", "gate_up", "w12"}
_DOWN = {"down_proj", "fc2", "c_proj", "w2", "dense_4h_to_h", "fc_out", "lin2", "linear2", "down", "wo"}
_HEADS = {"lm_head", "head", "embed_out", "output", "unembed"}
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish,
    nn.Identity,
)  # fmt: skip


def infer_roles(model: nn.Module, tp: int) -> dict[str, Role]:
    """Return the role of every sharded layer, by name."""
    roles = _from_transformers(model)
    if not roles:
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            found = {**_pairs(module), **_mlp(module), **_attention(module, tp)}
            roles |= {prefix + child: role for child, role in found.items()}
    roles |= _ends(model)
    _check_config(model, roles, tp)
    return {name: role for name, role in roles.items() if _fits(model.get_submodule(name), role, tp)}


def is_linear(module: nn.Module | None) -> bool:
    """Whether this is a linear layer: torch's, or the transposed one of GPT-2."""
    return isinstance(module, nn.Linear) or (module is not None and is_transposed(module))


def is_transposed(module: nn.Module) -> bool:
    """Whether this is `Conv1D` of transformers, whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def features(module: nn.Module) -> tuple[int, int]:
    """Return the number of inputs and outputs of a linear layer."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def _from_transformers(model: nn.Module) -> dict[str, Role]:
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, dict) or not any(style in _STYLES for style in plan.values()):
        return {}
    strange = {style for style in plan.values() if style not in _STYLES}
    if any("expert" in style for style in strange):
        raise LayoutError(
            f"tp does not shard the stacked experts of {type(model).__name__}", fix="use ep for them, or zero 3"
        )
    if strange:
        raise LayoutError(
            f"{type(model).__name__} has the unknown tp_plan style {sorted(strange)[0]!r}", fix="use zero 3 instead"
        )
    return {
        name: _STYLES[style]
        for name, module in model.named_modules()
        for pattern, style in plan.items()
        if fnmatch.fnmatchcase(name, pattern) and any(True for _ in module.parameters(recurse=False))
    }


def _attention(module: nn.Module, tp: int) -> dict[str, Role]:
    names = {name for name, child in module.named_children() if is_linear(child)}
    out = next((name for name in sorted(_ATTENTION_OUT) if name in names), None)
    if out is None:
        return {}
    parts = [next((name for name in sorted(kind) if name in names), None) for kind in (_QUERY, _KEY, _VALUE)]
    separate = [name for name in parts if name is not None]
    if len(separate) == 3 and _knows_its_heads(module):
        size = _head_size(module)
        assert size is not None
        counts = [features(module.get_submodule(name))[1] // size for name in separate]
        check_heads(counts[0], min(counts), tp)
        norms = {n: Role.HEAD_NORM for n in ("q_norm", "k_norm") if getattr(module, n, None) is not None}
        return {**dict.fromkeys(separate, Role.COLWISE), out: Role.ROWWISE, **norms}
    # The layout of a fused projection and the head count are unknown: gather its output.
    whole = [*separate, *sorted(_FUSED & names)]
    return {**dict.fromkeys(whole, Role.COLWISE_GATHERED), out: Role.ROWWISE_SCATTERED} if whole else {}


def _knows_its_heads(module: nn.Module) -> bool:
    """Whether attention derives its head count from a head size, so that it works on a shard of the heads."""
    head = _head_size(module)
    norms = [getattr(getattr(module, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    return head is not None and all(weight is None or weight.shape == (head,) for weight in norms)


def _head_size(module: nn.Module) -> int | None:
    size = getattr(module, "head_dim", getattr(module, "head_size", None))
    return size if isinstance(size, int) else None


def _mlp(module: nn.Module) -> dict[str, Role]:
    children = {name: child for name, child in module.named_children() if is_linear(child)}
    down = next((name for name in sorted(_DOWN) if name in children), None)
    if down is None:
        return {}
    wide = features(children[down])[0]
    fused = [n for n in sorted(_FUSED_UP & set(children)) if features(children[n])[1] == 2 * wide]
    if fused:
        return {fused[0]: Role.COLWISE_GATHERED, down: Role.ROWWISE_SCATTERED}
    ups = [n for n in sorted(_UP & set(children)) if features(children[n])[1] == wide and n != down]
    return {**dict.fromkeys(ups, Role.COLWISE), down: Role.ROWWISE} if ups else {}


def _pairs(module: nn.Module) -> dict[str, Role]:
    """Find Linear, elementwise, Linear in a sequence: the first colwise, the second rowwise."""
    if not isinstance(module, nn.Sequential):
        return {}
    roles: dict[str, Role] = {}
    waiting: str | None = None
    for name, child in module.named_children():
        if is_linear(child):
            if waiting is not None:
                roles |= {waiting: Role.COLWISE, name: Role.ROWWISE}
                waiting = None
            else:
                waiting = name
        elif not isinstance(child, _ELEMENTWISE):
            waiting = None
    return roles


def _ends(model: nn.Module) -> dict[str, Role]:
    names = {module: name for name, module in model.named_modules()}
    embeddings = [m for m in names if type(m) is nn.Embedding and m.max_norm is None and not m.sparse]
    first = _asked(model, "get_input_embeddings")
    if isinstance(first, nn.Embedding):
        # Encoder and decoder may have embeddings of their own that share one weight.
        embeddings = [m for m in names if isinstance(m, nn.Embedding) and m.weight is first.weight]
    last = _asked(model, "get_output_embeddings")
    heads = [m for m, n in names.items() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in _HEADS]
    heads = [last] if isinstance(last, nn.Linear) else heads
    tied = {id(m.weight) for m in embeddings}
    heads += [m for m in names if isinstance(m, nn.Linear) and id(m.weight) in tied and m not in heads]
    return {**{names[m]: Role.VOCAB for m in embeddings}, **{names[m]: Role.HEAD for m in heads}}


def _asked(model: nn.Module, question: str) -> Any:
    answer = getattr(model, question, None)
    try:
        return answer() if callable(answer) else None
    except (NotImplementedError, AttributeError):
        return None


def _check_config(model: nn.Module, roles: dict[str, Role], tp: int) -> None:
    """Check tp against the head counts of a model's config, where attention is sharded by heads."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    split = any(role is Role.COLWISE and name.rpartition(".")[2] in _QUERY | _FUSED for name, role in roles.items())
    if split and isinstance(heads, int):
        check_heads(heads, shared if isinstance(shared, int) else heads, tp)


def check_heads(heads: int, kv_heads: int, tp: int) -> None:
    """Raise `LayoutError` if tp does not divide the key-value heads."""
    if kv_heads % tp:
        nearest = max(n for n in range(1, min(tp, kv_heads) + 1) if kv_heads % n == 0)
        raise LayoutError(
            f"tp {tp} does not divide the {kv_heads} key-value heads (of {heads} heads)", fix=f"use tp={nearest}"
        )


def _fits(module: nn.Module, role: Role, tp: int) -> bool:
    """Whether tp divides the sharded dimension. The two layers of a pair share it, so both are sharded or neither."""
    if role in (Role.VOCAB, Role.HEAD, Role.HEAD_NORM):
        return True
    if not is_linear(module):
        return False
    inputs, outputs = features(module)
    return (outputs if role in (Role.COLWISE, Role.COLWISE_GATHERED) else inputs) % tp == 0
