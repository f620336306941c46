"""Agreement check: verify that all ranks call the same collective with compatible tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from piledriver.runtime.collectives.nested import leaves
from piledriver.runtime.errors import DisagreementError
from piledriver.runtime.world import World

Signature = tuple[str, tuple[tuple[str, tuple[int, ...], str], ...]]


def check_agreement(world: World, operation: str, data: Any, *, free_dim: int | None = None) -> None:
    """In debug mode, raise `DisagreementError` if operation, structure, shapes or dtypes differ between ranks.

    `free_dim` is a dimension whose length may differ, as before padding.
    """
    if not world.debug or not world.is_distributed:
        return
    signatures: list[Any] = [None] * world.size
    dist.all_gather_object(signatures, signature(operation, data))
    complaint = first_difference(signatures, free_dim)
    if complaint is not None:
        raise DisagreementError(
            complaint, fix="make every rank call the same collective with tensors of the same structure and shape"
        )


def signature(operation: str, data: Any) -> Signature:
    """Return what one rank is about to call.

    >>> signature("gather", {"x": torch.zeros(2, 3)})
    ('gather', (("['x']", (2, 3), 'float32'),))
    """
    described = []
    for path, leaf in leaves(data):
        name = "".join(f"[{part!r}]" for part in path)
        if isinstance(leaf, torch.Tensor):
            described.append((name, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")))
        else:
            described.append((name, (), type(leaf).__name__))
    return operation, tuple(described)


def first_difference(signatures: list[Signature], free_dim: int | None = None) -> str | None:
    """Return a message that says which ranks differ from the majority and how; None if all agree.

    >>> a, b = signature("gather", torch.zeros(2)), signature("gather", torch.zeros(3))
    >>> first_difference([a, a, b])
    'rank 2 differs from the others in gather: tensor has shape [3] float32, the others [2] float32'
    """
    comparable = [_without_dim(one, free_dim) for one in signatures]
    counts = Counter(comparable)
    if len(counts) == 1:
        return None
    # In a tie rank 0 counts as right, so that the message names one rank.
    usual = max(counts, key=lambda one: (counts[one], one == comparable[0]))
    odd = [rank for rank, one in enumerate(comparable) if one != usual]
    reference = signatures[comparable.index(usual)]
    return (
        f"rank {', '.join(map(str, odd))} differs from the others {_describe(signatures[odd[0]], reference, free_dim)}"
    )


def _describe(odd: Signature, usual: Signature, free_dim: int | None) -> str:
    if odd[0] != usual[0]:
        return f"in the operation: {odd[0]}, the others {usual[0]}"
    if [name for name, _, _ in odd[1]] != [name for name, _, _ in usual[1]]:
        return f"in {odd[0]}: its structure has {len(odd[1])} leaves {_names(odd)}, the others {_names(usual)}"
    pairs = zip(_without_dim(odd, free_dim)[1], _without_dim(usual, free_dim)[1], odd[1], usual[1], strict=True)
    for a, b, (name, shape, kind), (_, usual_shape, usual_kind) in pairs:
        if a != b:
            return (
                f"in {odd[0]}: tensor{name} has shape {list(shape)} {kind}, the others {list(usual_shape)} {usual_kind}"
            )
    return f"in {odd[0]}"


def _names(one: Signature) -> str:
    return "(" + ", ".join(name for name, _, _ in one[1][:4]) + (", ...)" if len(one[1]) > 4 else ")")


def _without_dim(one: Signature, dim: int | None) -> Signature:
    if dim is None:
        return one
    freed = []
    for name, shape, kind in one[1]:
        if -len(shape) <= dim < len(shape):
            at = dim % len(shape)
            shape = (*shape[:at], -1, *shape[at + 1 :])
        freed.append((name, shape, kind))
    return one[0], tuple(freed)
