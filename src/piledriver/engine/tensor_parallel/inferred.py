"""Tensor parallelism of third-party models, by the roles of `roles.py`.

Activations between sharded layers are replicated (no sequence parallelism), since the model's code depends on their
shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from piledriver.engine.shards.collectives import Group, copy_to_region, reduce_from_region, scatter_to_region
from piledriver.engine.shards.local_params import (
    Reader,
    RowParallelBias,
    SumGradient,
    part,
    place_parameter,
    place_rest,
)
from piledriver.engine.tensor_parallel.activation_hooks import SequenceParallelHooks, VocabParallelEmbedding
from piledriver.engine.tensor_parallel.roles import Role, features, infer_roles, is_transposed
from piledriver.engine.tensor_parallel.transformer import gather_columns

_log = logging.getLogger(__name__)


def split_inferred(model: nn.Module, mesh: DeviceMesh) -> dict[str, Role]:
    """Shard a model over tp by the roles of its layers, in place; return the roles."""
    group = Group.of(mesh)
    roles = infer_roles(model, group.size)
    if group.rank == 0 and {Role.VOCAB, Role.HEAD}.issuperset(roles.values()):
        _log.warning(
            "tp %d shards only embeddings and heads of %s; its other layers are replicated, because their names are "
            "unknown or tp does not divide their sizes. Fix: use zero=3, which shards any model",
            group.size,
            type(model).__name__,
        )
    placed: dict[nn.Parameter, nn.Parameter] = {}
    entries: dict[str, SharedEntry] = {}
    for name, role in roles.items():
        module = model.get_submodule(name)
        _place(module, role, mesh, placed, group)
        _hook(module, role, mesh, group, entries.setdefault(name.rpartition(".")[0], SharedEntry(group)))
        if role is Role.COLWISE:
            _count_heads(model.get_submodule(name.rpartition(".")[0]), group.size)
    place_rest(model, mesh, placed)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            _read_with_parent(module)
    return roles


@contextmanager
def split_logits(model: nn.Module) -> Iterator[None]:
    """Keep logits sharded over the vocabulary in forwards within the block, as `F.cross_entropy` accepts.

    For losses that a user computes on the logits of a model with inferred roles: no rank holds full logits. The
    backward may come after the block.
    """
    heads = [hook for module in model.modules() for hook in module._forward_hooks.values() if isinstance(hook, Head)]
    for head in heads:
        head.sharded = True
    operators = VocabParallelOperators()
    try:
        yield
    finally:
        operators.release()
        for head in heads:
            head.sharded = False


class VocabParallelOperators:
    """Keeps torch's cross-entropy of sharded logits installed while any of these objects is in use.

    The backward needs it too: every sharded logits tensor holds one of these until its gradient came, or until its
    graph is gone.
    """

    _installed: ExitStack | None = None
    _users = 0

    def __init__(self) -> None:
        kind = VocabParallelOperators
        if kind._users == 0:
            kind._installed = ExitStack()
            kind._installed.enter_context(loss_parallel())
        kind._users += 1
        self.in_use = True

    def release(self, _gradient: Tensor | None = None) -> None:
        """Stop needing the operators; the last user removes them. Also the hook of a tensor, which changes nothing."""
        kind = VocabParallelOperators
        if self.in_use:
            self.in_use = False
            kind._users -= 1
            if kind._users == 0 and kind._installed is not None:
                kind._installed.close()

    def __del__(self) -> None:
        self.release()


def _place(
    module: nn.Module, role: Role, mesh: DeviceMesh, placed: dict[nn.Parameter, nn.Parameter], group: Group
) -> None:
    rows, columns = (1, 0) if is_transposed(module) else (0, 1)
    for leaf in list(module._parameters):
        placement: Placement = Replicate()
        reader: Reader = part
        if role in (Role.ROWWISE, Role.ROWWISE_SCATTERED):
            placement, reader = (Shard(columns), part) if leaf == "weight" else (Replicate(), RowParallelBias(group))
        elif role is Role.HEAD_NORM:
            reader = SumGradient(group)
        else:
            placement = Shard(rows if leaf == "weight" else 0)
        place_parameter(module, leaf, mesh, [placement], placed, reader)


class SharedEntry:
    """The input that several layers share: its gradient is all-reduced once for all of them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.readers = 0
        self._reads = 0
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if self._last is None or self._last[0] is not x:
            self._last, self._reads = (x, copy_to_region(x, self.group)), 0
        entered = self._last[1]
        self._reads += 1
        if self._reads == self.readers:
            self._last = None
        return (entered, *args[1:])

    def __deepcopy__(self, memo: Any) -> SharedEntry:
        return self


class Head:
    """Gathers the logits, or returns them as one sharded `DTensor`."""

    def __init__(self, mesh: DeviceMesh, group: Group, columns: int) -> None:
        self.mesh, self.group, self.columns = mesh, group, columns
        self.sharded = False

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if self.sharded:
            whole = torch.empty((*out.shape[:-1], self.columns), device="meta")
            split: Tensor = DTensor.from_local(
                out, self.mesh, [Shard(out.dim() - 1)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            if split.requires_grad:
                split.register_hook(VocabParallelOperators().release)  # type: ignore[no-untyped-call]
            return split
        return gather_columns(out, self.columns, self.group)

    def __deepcopy__(self, memo: Any) -> Head:
        return self


def _hook(module: nn.Module, role: Role, mesh: DeviceMesh, group: Group, entry: SharedEntry) -> None:
    if role is Role.VOCAB:
        _split_vocabulary(module, group)
        return
    if role is Role.HEAD_NORM:
        return
    if role in (Role.COLWISE, Role.COLWISE_GATHERED, Role.HEAD):
        entry.readers += 1
        module.register_forward_pre_hook(entry)
    if role is Role.ROWWISE_SCATTERED:
        module.register_forward_pre_hook(lambda _, args: (scatter_to_region(args[0], -1, group), *args[1:]))
    if role in (Role.ROWWISE, Role.ROWWISE_SCATTERED):
        module.register_forward_hook(lambda _, args, out: reduce_from_region(out, group))
    # A `DTensor` has the shape of the full layer.
    columns = features(module)[1]
    if role is Role.COLWISE_GATHERED:
        module.register_forward_hook(lambda _, args, out: gather_columns(out, columns, group))
    if role is Role.HEAD:
        module.register_forward_hook(Head(mesh, group, columns))
    if is_transposed(module) and role in (Role.COLWISE, Role.COLWISE_GATHERED):
        whole: Any = module
        whole.nf = columns // group.size


def _split_vocabulary(module: Any, group: Group) -> None:
    rows = -(-module.num_embeddings // group.size)
    first = min(group.rank * rows, module.num_embeddings)
    count = min(rows, module.num_embeddings - first)
    VocabParallelEmbedding(first, count, SequenceParallelHooks(group, by_sequence=False)).attach(module)
    if module.padding_idx is not None:
        here = first <= module.padding_idx < first + count
        module.padding_idx = module.padding_idx - first if here else None


_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads")


def _count_heads(module: nn.Module, tp: int) -> None:
    """Set the head counts of an attention module to those of this rank, once."""
    if module.__dict__.setdefault("_heads_split_over", 1) == tp:
        return
    module.__dict__["_heads_split_over"] = tp
    for name in _COUNTS:
        count = module.__dict__.get(name)
        if isinstance(count, int) and count % tp == 0:
            setattr(module, name, count // tp)


def _read_with_parent(attention: nn.MultiheadAttention) -> None:
    """Read the output layer's weights locally while torch's attention runs, which does not call that layer."""
    child = attention.out_proj

    def begin(module: nn.Module, args: Any) -> None:
        child._reads_locally = True  # type: ignore[assignment]

    def end(module: nn.Module, args: Any, out: Any) -> None:
        child._reads_locally = False  # type: ignore[assignment]

    attention.register_forward_pre_hook(begin)
    attention.register_forward_hook(end, always_call=True)
