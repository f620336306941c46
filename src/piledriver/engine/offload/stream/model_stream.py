"""Stream the weights of a model's modules to the device that computes, with hooks around the modules' calls.

A group is a module whose weights come and go together: a block with all its weights, or one layer outside the blocks.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_any, tree_leaves

from piledriver.engine.blocks import blocks_of
from piledriver.engine.offload.freed_memory import return_freed_memory
from piledriver.engine.offload.stream.block_stream import BlockStream
from piledriver.engine.offload.stream.depth import window_bytes
from piledriver.engine.offload.stream.hooks import attach_stream, detach_stream
from piledriver.engine.offload.stream.weight_block import Source, StreamedTensor, StreamMemory, WeightBlock
from piledriver.models.codes import QuantisedCodes
from piledriver.runtime.collectives.nested import send_to_device


@dataclass(frozen=True)
class StreamedGroup:
    """A module whose weights are streamed together: its own, or those of its submodules too."""

    name: str
    module: nn.Module
    whole: bool

    def weights(self, buffers: bool) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        """Yield (full name, owner, name in it, tensor) of parameters, and of persistent buffers if asked.

        The codes and scales of quantised layers are buffers and count as weights.
        """
        for path, module in self.module.named_modules(remove_duplicate=True) if self.whole else [("", self.module)]:
            prefix = ".".join(part for part in (self.name, path) if part)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{prefix}.{name}".lstrip("."), module, name, parameter
            if buffers or isinstance(module, QuantisedCodes):
                for name, buffer in module._buffers.items():
                    if buffer is not None and name not in module._non_persistent_buffers_set:
                        yield f"{prefix}.{name}".lstrip("."), module, name, buffer


def groups_in(
    model: nn.Module, module: nn.Module, name: str = "", whole_classes: Sequence[str] = (), *, by_block: bool = True
) -> list[StreamedGroup]:
    """Return the groups of a module of a model: blocks, modules of `whole_classes`, and layers outside both."""
    blocks = {id(block) for block in blocks_of(model).values()} if by_block else set()
    seen: set[int] = set()

    def walk(at: nn.Module, path: str) -> Iterator[StreamedGroup]:
        if id(at) in seen:
            return
        seen.add(id(at))
        is_block = id(at) in blocks and type(at).forward is not nn.Module.forward
        if is_block or type(at).__name__ in whole_classes:
            seen.update(id(inner) for inner in at.modules())
            yield StreamedGroup(path, at, whole=True)
            return
        if any(one is not None for one in (*at._parameters.values(), *at._buffers.values())):
            yield StreamedGroup(path, at, whole=False)
        for child_name, child in at.named_children():
            yield from walk(child, f"{path}.{child_name}" if path else child_name)

    return list(walk(module, name))


class ModelStream:
    """The streamed groups of a model on one device. Weights enter the modules when these are called."""

    def __init__(
        self,
        groups: Sequence[StreamedGroup],
        source_of: Callable[[str, Tensor], Source | None],
        device: torch.device | str,
        *,
        buffers: bool = False,
        skip_keys: Any = None,
        deepest: int = 4,
    ) -> None:
        """Stream the weights of groups; those whose source is None stay in the module.

        `skip_keys` names keyword arguments that are not moved to the device.
        """
        return_freed_memory()
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.skip_keys = skip_keys
        self.memory = StreamMemory(self.device)
        self.modules: list[nn.Module] = []
        blocks: list[WeightBlock] = []
        # Only tied weights are remembered: others are freed here as soon as they are packed.
        uses = Counter(id(tensor) for group in groups for *_, tensor in group.weights(buffers))
        known: dict[int, tuple[StreamedGroup, StreamedTensor, Tensor]] = {}
        for group in groups:
            found: list[StreamedTensor] = []
            for name, owner, leaf, tensor in list(group.weights(buffers)):
                tied = known.get(id(tensor))
                if tied is not None and owner in set(tied[0].module.modules()):
                    tied[1].owners.append((owner, leaf))
                    tied[1].put(tied[1].absent)
                    continue
                source = source_of(name, tensor) if tied is None else tied[1].source
                if source is None:
                    continue
                absent = _absent(tensor) if tied is None else tied[1].absent
                is_shared = tied is not None and isinstance(source, Tensor)
                found.append(StreamedTensor([(owner, leaf)], absent, source, is_shared))
                if uses[id(tensor)] > 1:
                    known.setdefault(id(tensor), (group, found[-1], tensor))
            if found:
                blocks.append(WeightBlock(group.name, found, self.memory))
                blocks[-1].evict()
                self.modules.append(group.module)
        self.blocks = blocks
        self._start(deepest)
        for number, module in enumerate(self.modules):
            attach_stream(module, self, number)

    def _start(self, deepest: int) -> None:
        # Memory that the system provides when it is touched cannot be found missing here: 0 must be asked for.
        depth = min(1, deepest)
        self.stream = BlockStream(self.blocks, self.device, depth=depth, deepest=deepest, make_room=self._make_room)
        if not self._make_room(self.stream.depth):
            self.stream.depth = 0
            if not self._make_room(0):
                largest = max(self.blocks, key=lambda block: block.nbytes)
                raise torch.OutOfMemoryError(
                    f"{self.device} has no room for the {largest.nbytes / 2**20:,.0f} MiB of {largest.name}"
                )

    def _make_room(self, depth: int) -> bool:
        sizes = [block.nbytes for block in self.blocks]
        return self.memory.resize(window_bytes(sizes, depth))

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over all groups brings to the device."""
        return sum(block.nbytes for block in self.blocks)

    def need(self, number: int, *, records_gradients: bool = False) -> None:
        """Bring the weights of a group into its modules."""
        self.blocks[number].records_gradients = records_gradients
        # Threads fill the memory, and they are outside the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.stream.need(number)

    def done(self, number: int) -> None:
        """Take the weights of a group out of its modules."""
        with torch.inference_mode(False), torch.no_grad():
            self.stream.done(number)

    def before(self, number: int, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """See `CalledStream`."""
        records = torch.is_grad_enabled() and self._needs_gradients(number, args, kwargs)
        self.need(number, records_gradients=records)
        return self.to_device(args, kwargs)

    def after(self, number: int, _out: Any) -> None:
        """See `CalledStream`."""
        self.done(number)

    def _needs_gradients(self, number: int, args: Any, kwargs: Any) -> bool:
        held = self.blocks[number].tensors
        return any(tensor.absent.requires_grad for tensor in held) or any(
            leaf.requires_grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        )

    def to_device(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments on the device; None if they are there."""
        if not tree_any(self._is_elsewhere, (args, kwargs)):
            return None
        return send_to_device(args, self.device), send_to_device(kwargs, self.device, skip_keys=self.skip_keys)

    def _is_elsewhere(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.device != self.device

    def forget(self, module: nn.Module) -> dict[str, Tensor]:
        """Stop streaming a module's own weights; return them by name, in host memory."""
        found: dict[str, Tensor] = {}
        for number, block in enumerate(self.blocks):
            if any(owner is module for tensor in block.tensors for owner, _ in tensor.owners):
                self.stream.evict_unused()
                for tensor in block.forget(module):
                    found |= {leaf: tensor.load() for owner, leaf in tensor.owners if owner is module}
            if not block.tensors:
                detach_stream(self.modules[number], self)
        if not any(block.tensors for block in self.blocks):
            self.memory.close()
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelStream:
        made: ModelStream = ModelStream.__new__(ModelStream)
        memo[id(self)] = made
        made.device, made.skip_keys = self.device, self.skip_keys
        made.memory = StreamMemory(self.device)
        made.modules = [copy.deepcopy(module, memo) for module in self.modules]
        made.blocks = [block.copied(made.memory, memo) for block in self.blocks]
        made._start(self.stream.deepest)
        return made


def _absent(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        return made
    return empty
