"""Find the blocks of a model: the repeated modules that are sharded, recomputed, compiled and split into stages."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from piledriver.models import Transformer

# A list with less than this fraction of the largest list's parameters (a stack of heads, say) holds no blocks.
_SMALLEST_SHARE = 0.1


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in order; empty if nothing repeats.

    For our `Transformer`, its blocks; for others, the members of the outermost lists of modules of one class, such as
    `model.layers` of Hugging Face models.

    >>> list(blocks_of(nn.Sequential(nn.Embedding(9, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))))))
    ['1.0', '1.1']
    """
    stacks = [
        {f"{name}.blocks.{key}".lstrip("."): block for key, block in module.blocks.items()}
        for name, module in model.named_modules()
        if isinstance(module, Transformer)
    ]
    if not stacks:
        stacks = _stacks(model)
    sizes = [sum(p.numel() for block in stack.values() for p in block.parameters()) for stack in stacks]
    return {
        name: block
        for stack, size in zip(stacks, sizes, strict=True)
        if size and size >= _SMALLEST_SHARE * max(sizes)
        for name, block in stack.items()
    }


def _stacks(model: nn.Module) -> list[dict[str, nn.Module]]:
    """Return the outermost lists of modules of one class, each as names to members."""
    found: list[dict[str, nn.Module]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if (inside and name.startswith(inside)) or not _is_stack(module):
            continue
        found.append({f"{name}.{key}".lstrip("."): member for key, member in module.named_children()})
        inside = (*inside, f"{name}." if name else "")
    return found


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    members = dict(module.named_children())
    if not all(key.isdigit() for key in members) or len({type(member) for member in members.values()}) != 1:
        return False
    # A list of one (in a pipeline stage) is a stack if its member has children, as blocks do.
    return len(members) > 1 or (
        not isinstance(module, nn.Sequential) and any(True for member in members.values() for _ in member.children())
    )


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of every list of several modules of one class, nested lists included.

    >>> len(repeated_blocks(nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), nn.ReLU())))
    3
    """
    return [member for module in model.modules() if is_repeated(module) for member in module.children()]


def is_repeated(module: nn.Module) -> bool:
    """Whether this is a list of several modules of one class."""
    return isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(member) for member in module}) == 1


def block_kind(module: nn.Module) -> Hashable:
    """Return a key that blocks with the same parameters by name and shape share."""
    return type(module), tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
