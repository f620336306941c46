"""Tensor and sequence parallelism of our own `Transformer`, by the names of its parameters' axes.

Fused projections are stored so that even chunks are valid (`models.axes`): every rule is to shard the named dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from piledriver.engine.errors import LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.pipeline_parallel.split import stage_borders
from piledriver.engine.shards.collectives import (
    Group,
    copy_to_region,
    gather_from_region,
    pad_to_multiple,
    reduce_from_region,
)
from piledriver.engine.shards.local_params import RowParallelBias, SumGradient, part, place_parameter
from piledriver.engine.tensor_parallel.activation_hooks import (
    SequenceParallelHooks,
    ShardedRMSNorm,
    VocabParallelEmbedding,
    hook_input,
    hook_output,
)
from piledriver.engine.tensor_parallel.roles import check_heads
from piledriver.engine.tensor_parallel.vocab_parallel_loss import (
    vocab_parallel_cross_entropy,
    vocab_parallel_token_losses,
)
from piledriver.kernels.attention import Mask
from piledriver.models import LossSums, ModelConfig, Transformer, parameter_axes
from piledriver.models.attention.latent import LatentAttention
from piledriver.models.attention.layer import Attention
from piledriver.models.axes import Axes
from piledriver.models.codes import QuantisedCodes
from piledriver.models.config import gate_block_of
from piledriver.models.feed_forward.moe import Experts, MoE, Routing
from piledriver.models.loss import linear_cross_entropy, token_losses

SPLIT_AXES = frozenset({"heads", "kv_heads", "mlp", "vocab"})
"""The axes that tp shards; all others are replicated."""
_OF_STREAM = frozenset({"embed", "latent", "gate"})
"""The axes of parameters that read the residual stream as it is: a shard of it with sequence parallelism."""


def split_transformer(model: Transformer, mesh: DeviceMesh, layout: Layout) -> None:
    """Shard the parameters of a `Transformer`, or of its pipeline stage, over tp and hook the collectives."""
    config = model.config
    if any(isinstance(module, QuantisedCodes) for module in model.modules()):
        raise LayoutError("tp does not shard quantised linear layers", fix="shard the dense model, or use tp=1")
    check_tp_divisible(config, layout.tp)
    split = SPLIT_AXES if layout.loss_parallel else SPLIT_AXES - {"vocab"}
    stream = SequenceParallelHooks(Group.of(mesh), by_sequence=layout.sequence_parallel)
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            _split_heads(module, stream)
        elif isinstance(module, MoE):
            _split_experts(module, stream)
    axes = parameter_axes(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts) and layout.ep > 1:
            continue  # `shard_experts` shards them over ep and tp at once.
        here = {leaf: axes[f"{name}.{leaf}"] for leaf in module._parameters if f"{name}.{leaf}" in axes}
        _place(module, here, split, mesh, placed, stream)
    _hook_ends(model, config, stream, vocabulary_split=layout.loss_parallel)


def placement_of(axes: Axes, split: frozenset[str]) -> Placement:
    """Return the placement of one parameter over tp.

    >>> placement_of(("embed", "mlp"), SPLIT_AXES)
    Shard(dim=1)
    """
    found = [dim for dim, axis in enumerate(axes) if axis in split]
    return Shard(found[0]) if found else Replicate()


def check_tp_divisible(config: ModelConfig, tp: int) -> None:
    """Raise `LayoutError` if tp does not divide the heads or the blocks of gate rows."""
    check_heads(config.heads, config.kv_heads, tp)
    widths = {"mlp_dim": config.mlp_dim} if config.expert_layers < config.layers else {}
    if config.moe is not None:
        widths |= {"moe.expert_dim": config.moe.expert_dim}
        widths |= {"moe.shared_dim": config.moe.shared_dim} if config.moe.shared_dim else {}
    for name, width in widths.items():
        step = gate_block_of(width) if config.mlp == "gated" else 1
        if width % (tp * step):
            parts = width // step
            nearest = max(n for n in range(1, tp + 1) if parts % n == 0 and config.kv_heads % n == 0)
            raise LayoutError(
                f"tp {tp} does not divide the {parts} blocks of {step} that {name} {width} is stored in",
                fix=f"use tp={nearest}",
            )


def _place(
    module: nn.Module,
    axes: dict[str, Axes],
    split: frozenset[str],
    mesh: DeviceMesh,
    placed: dict[nn.Parameter, nn.Parameter],
    stream: SequenceParallelHooks,
) -> None:
    weight = axes.get("weight", ())
    by_rows = len(weight) > 1 and weight[0] in split and weight[0] != "vocab" and weight[-1] != "head_dim"
    by_columns = len(weight) > 1 and weight[-1] in split
    for leaf, names in axes.items():
        reader: Callable[[Tensor], Tensor] = part
        if leaf == "bias" and by_columns:
            reader = RowParallelBias(stream.group)
        elif names in (("head_dim",), ("activation",)) or (stream.by_sequence and _OF_STREAM.issuperset(names)):
            reader = SumGradient(stream.group)
        place_parameter(module, leaf, mesh, [placement_of(names, split)], placed, reader)
    if by_rows:
        hook_input(module, stream)
    elif by_columns:
        hook_output(module, stream)


def _split_heads(attention: Attention | LatentAttention, stream: SequenceParallelHooks) -> None:
    config, group = attention.config, stream.group
    attention.kernel = LocalHeads(attention.kernel, group)
    if isinstance(attention, LatentAttention):
        # Each rank's heads read the one key: whole along the sequence, its gradient summed over ranks.
        attention.share_key = stream.gather_input
    if config.qk_norm == "full":
        width = config.head_dim
        for name, heads in (("q_norm", config.heads), ("k_norm", config.kv_heads)):
            norm = cast(Any, getattr(attention, name))
            setattr(attention, name, ShardedRMSNorm(norm.weight, heads * width, config.norm_eps, group))


class LocalHeads:
    """The attention kernel for this rank's heads: it takes its share of masks and slopes given per head."""

    def __init__(self, inner: Callable[..., Tensor], group: Group) -> None:
        self.inner, self.group = inner, group

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, slopes: Tensor | None = None, **options: Any
    ) -> Tensor:
        mask, slopes = heads_of(mask, slopes, self.group.rank * q.shape[1], q.shape[1])
        return self.inner(q, k, v, mask, slopes=slopes, **options)


def heads_of(mask: Mask, slopes: Tensor | None, first: int, count: int) -> tuple[Mask, Tensor | None]:
    """Return a mask and ALiBi slopes for `count` heads from `first` on."""
    if mask.dense is not None and mask.dense.shape[1] > 1:
        mask = mask._replace(dense=mask.dense.narrow(1, first, count))
    return mask, None if slopes is None else slopes.narrow(0, first, count)


def _split_experts(moe: MoE, stream: SequenceParallelHooks) -> None:
    moe.dispatch = ExpertTensorParallel(moe.dispatch, stream.group)
    moe.register_forward_pre_hook(lambda _, args: (stream.gather(args[0]),))
    moe.register_forward_hook(lambda _, args, out: (stream.scatter(out[0]), out[1]))


class ExpertTensorParallel:
    """Experts sharded over tp along their hidden width. The router is replicated."""

    def __init__(self, inner: Callable[[Experts, Tensor, Routing], Tensor], group: Group) -> None:
        self.inner, self.group = inner, group

    def __call__(self, experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
        routing = routing._replace(weights=copy_to_region(routing.weights, self.group))
        return reduce_from_region(self.inner(experts, copy_to_region(tokens, self.group), routing), self.group)


def _hook_ends(
    model: Transformer, config: ModelConfig, stream: SequenceParallelHooks, *, vocabulary_split: bool
) -> None:
    rows = -(-config.vocab_size // stream.group.size)
    first = min(stream.group.rank * rows, config.vocab_size)
    count = min(rows, config.vocab_size - first)
    if model.embedding is not None and vocabulary_split:
        VocabParallelEmbedding(first, count, stream).attach(model.embedding)
    elif model.embedding is not None:
        model.embedding.register_forward_pre_hook(lambda _, args: stream.begin(args[0]))
        model.embedding.register_forward_hook(lambda _, args, out: stream.scatter(out))
    if model.position_embedding is not None:
        model.position_embedding.register_forward_hook(lambda _, args, out: stream.scatter(out))
    entries, exits = stage_borders(model)
    for name in entries:
        model.get_submodule(name).register_forward_pre_hook(lambda _, args: _begin_stage(stream, args))
    for name in exits:
        model.get_submodule(name).register_forward_hook(lambda _, args, out: (stream.gather(out[0]), out[1]))
    if vocabulary_split:
        model.cross_entropy = VocabParallelLoss(stream, first)
        model.token_losses = lambda hidden, weight, targets, **options: vocab_parallel_token_losses(
            stream.gather_input(hidden), part(weight), targets, first=first, group=stream.group, **options
        )
        model.project = VocabParallelLogits(stream, config.vocab_size)
    else:
        model.cross_entropy = lambda hidden, weight, *args, **options: linear_cross_entropy(
            stream.gather(hidden), part(weight), *args, **options
        )
        model.token_losses = lambda hidden, weight, *args, **options: token_losses(
            stream.gather(hidden), part(weight), *args, **options
        )
        model.project = lambda hidden, weight: F.linear(stream.gather(hidden), part(weight).to(hidden.dtype))


def _begin_stage(stream: SequenceParallelHooks, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Scatter the stream, which is replicated between pipeline stages."""
    stream.begin(args[0])
    return (stream.scatter(args[0]), *args[1:])


class VocabParallelLoss:
    """The loss with the output rows from `first` on here."""

    def __init__(self, stream: SequenceParallelHooks, first: int) -> None:
        self.stream, self.first = stream, first

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> LossSums:
        if options.get("chunk_tokens") == 0:
            options["chunk_tokens"] = max(targets.numel(), 1)
        whole = self.stream.gather_input(hidden)
        return vocab_parallel_cross_entropy(
            whole, part(weight), targets, first=self.first, group=self.stream.group, **options
        )


class VocabParallelLogits:
    """Full logits: shards computed where their rows are, then gathered."""

    def __init__(self, stream: SequenceParallelHooks, vocab_size: int) -> None:
        self.stream, self.vocab_size = stream, vocab_size

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        group, whole = self.stream.group, self.stream.gather_input(hidden)
        logits = F.linear(whole, part(weight).to(hidden.dtype))
        return gather_columns(logits, self.vocab_size, group)


def gather_columns(x: Tensor, columns: int, group: Group) -> Tensor:
    """Gather shards of the last dimension; the last ones may be shorter."""
    piece = -(-columns // group.size)
    x = pad_to_multiple(x, -1, piece) if x.shape[-1] else x.new_zeros(*x.shape[:-1], piece)
    return gather_from_region(x, -1, group).narrow(-1, 0, columns)
