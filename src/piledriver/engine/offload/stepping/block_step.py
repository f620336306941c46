"""Step an optimizer block by block: read masters and states of the next block, compute this one, write the last one.

The optimizer object steps on stand-ins: tensors over a buffer, which its groups hold for the duration of one block.
Masters and states in host memory are stepped in place between the blocks from disk, so that the disk stays busy.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from piledriver.engine.errors import LayoutError
from piledriver.engine.offload.disk.block_file import Region
from piledriver.engine.offload.disk.direct_io import Transfer
from piledriver.engine.offload.disk.host_buffer import whole_pages
from piledriver.engine.offload.disk.rate import warn_if_slow
from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.stepping.pipeline import Slot, SlotPipeline, Staged
from piledriver.engine.tiers import Offload
from piledriver.kernels.rounding import NOISE_STRIDE
from piledriver.optim import capabilities
from piledriver.optim.shards import local

_WEIGHT, _GRADIENT, _SOURCE = "weight", "gradient", "source"
# Pieces of a tensor begin at a page whatever the dtype of a state is.
_PIECE_ELEMENTS = 4096


class WeightPiece(NamedTuple):
    """Elements `start` to `stop` of a master weight."""

    master: MasterWeight
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the whole weight."""
        return self.stop - self.start == self.master.part.numel()

    @property
    def is_last(self) -> bool:
        """Whether the piece ends the weight."""
        return self.stop == self.master.part.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """Return this piece of a tensor of the weight's size; a whole piece has the weight's shape."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class StepBlock:
    """Pieces that are stepped together."""

    pieces: list[WeightPiece]
    on_disk: bool


class BlockStep:
    """Steps one optimizer on master weights in blocks of at most a buffer."""

    def __init__(self, optimizer: Optimizer, tiers: Offload) -> None:
        if not capabilities(optimizer).per_parameter:
            raise LayoutError(
                f"{type(optimizer).__name__} updates all parameters together, and {tiers!r} steps block by block",
                fix="use AdamW, or offload='optimizer'",
            )
        self.optimizer, self.tiers = optimizer, tiers
        self.raw: Callable[[Optimizer], Any] = inspect.unwrap(type(optimizer).step)
        self.elementwise = capabilities(optimizer).elementwise
        self.state_bytes = state_bytes_per_element(optimizer, self.raw)
        self.slots: list[Slot] = []

    @property
    def masters(self) -> list[MasterWeight]:
        """The master weights that the optimizer holds, in the order of its groups."""
        held = [one for group in self.optimizer.param_groups for one in group["params"]]
        return [one.master_weight for one in held if hasattr(one, "master_weight")]

    def reserve(self) -> None:
        """Preallocate the files of states that do not exist yet, so that a full disk is found before the first step.

        Gradients that do not exist yet need their room beside the states.
        """
        held = self.masters
        for store in dict.fromkeys(store for one in held for store in (one.store, one.gradient_store)):
            if store is None:
                continue
            states = [one.part.numel() for one in held if one.store is store and one.tensor not in self.optimizer.state]
            gradients = [one.part for one in held if one.gradient_store is store and one.gradient is None]
            store.reserve(
                sum(int(n * self.state_bytes) + 4 * _PIECE_ELEMENTS for n in states)
                + sum(whole_pages(part.numel() * 4) for part in gradients)
            )

    def blocks(self, masters: list[MasterWeight]) -> list[StepBlock]:
        """Return the blocks of some master weights; those from disk and those in memory alternate as masters do."""
        size = self.tiers.buffer_bytes // int(self._slot_bytes_per_element() + 1)
        most = max(size // _PIECE_ELEMENTS, 1) * _PIECE_ELEMENTS
        made: list[StepBlock] = []
        filling: dict[bool, list[WeightPiece]] = {True: [], False: []}
        for master in masters:
            on_disk = master.store is not None or master.gradient_store is not None
            for piece in self._pieces(master, most if on_disk else None):
                pieces = filling[on_disk]
                if pieces and sum(one.stop - one.start for one in pieces) + piece.stop - piece.start > most:
                    made.append(StepBlock(pieces, on_disk))
                    pieces = filling[on_disk] = []
                pieces.append(piece)
        return made + [StepBlock(pieces, on_disk) for on_disk, pieces in filling.items() if pieces]

    def _pieces(self, master: MasterWeight, most: int | None) -> list[WeightPiece]:
        size = master.part.numel()
        if most is None or not self.elementwise:
            return [WeightPiece(master, 0, size)]
        return [WeightPiece(master, start, min(start + most, size)) for start in range(0, size, most)]

    def _slot_bytes_per_element(self) -> float:
        gradient = 4 if self.tiers.gradients == "disk" else 0
        source = 4 if self.tiers.parameters == "disk" else 0
        return 4 + self.state_bytes + gradient + source

    def slots_for(self, blocks: list[StepBlock]) -> list[Slot]:
        """Return the buffers, made for the largest of these blocks when first asked for."""
        if not self.slots and blocks:
            per, pages = self._slot_bytes_per_element(), 8 * _PIECE_ELEMENTS
            largest = max(sum(int((p.stop - p.start) * per) + pages for p in block.pieces) for block in blocks)
            self.slots = [Slot(largest, pin=self.tiers.pin) for _ in range(min(self.tiers.buffers, len(blocks)))]
        return self.slots

    @torch.no_grad()
    def step(self) -> None:
        """Step on every master weight that has a gradient, and on the optimizer's other parameters."""
        self.step_others()
        run = StepRun(self, self.blocks([master for master in self.masters if master.tensor.grad is not None]))
        try:
            for block in run.blocks:
                run.compute(block)
        finally:
            run.finish()

    def step_others(self) -> None:
        """Step on the parameters that have no master weight (those that stay on the device)."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        others = [[one for one in params if not hasattr(one, "master_weight")] for params in groups]
        if any(one.grad is not None for params in others for one in params):
            self.raw_step(others)

    def raw_step(self, params: list[list[Tensor]]) -> None:
        """Run the optimizer's own step with other parameters in its groups."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        try:
            for group, held in zip(self.optimizer.param_groups, params, strict=True):
                group["params"] = held
            self.raw(self.optimizer)
        finally:
            for group, held in zip(self.optimizer.param_groups, groups, strict=True):
                group["params"] = held


class StepRun:
    """One step over blocks, in order: prefetches from the start, and writes behind."""

    def __init__(self, owner: BlockStep, blocks: list[StepBlock]) -> None:
        self.owner, self.optimizer, self.blocks = owner, owner.optimizer, blocks
        self.factor: Tensor | None = None
        """What gradients are scaled by before their step."""
        held = [(number, one) for number, g in enumerate(self.optimizer.param_groups) for one in g["params"]]
        self._place = {id(one): (group, position) for position, (group, one) in enumerate(held, start=1)}
        masters = dict.fromkeys(piece.master for block in blocks for piece in block.pieces)
        self._stores = [store for store in dict.fromkeys(master.store for master in masters) if store is not None]
        for master in masters:
            self._adopt_states(master)
        self._before = {master: dict(self.optimizer.state.get(master.tensor, {})) for master in masters}
        self._after: dict[MasterWeight, dict[str, Any]] = defaultdict(dict)
        for store in self._stores:
            store.settle()
        self._meters = [(store, store.io.meter.now()) for store in self._stores]
        from_disk = [block for block in blocks if block.on_disk]
        self._pipeline = SlotPipeline(from_disk, owner.slots_for(from_disk), self._read) if from_disk else None

    def _adopt_states(self, master: MasterWeight) -> None:
        """Move states that were loaded into memory to the tier of their weight."""
        store = master.store
        state = self.optimizer.state.get(master.tensor, {}) if store is not None else {}
        for key, value in state.items():
            if store is not None and _is_array(value) and store.find(local(value)) is None:
                state[key] = _as(value, store.put(local(value)))

    def _read(self, block: StepBlock, slot: Slot) -> list[Transfer]:
        transfers = []
        for piece in block.pieces:
            master = piece.master
            wanted: list[tuple[str, Tensor, Any]] = []
            if master.store is not None:
                wanted.append((_WEIGHT, master.part, master.store))
                arrays = ((key, local(value)) for key, value in self._before[master].items() if _is_array(value))
                wanted += [(key, value, master.store) for key, value in arrays]
            if master.gradient_store is not None and master.gradient is not None:
                wanted.append((_GRADIENT, master.gradient, master.gradient_store))
            for key, tensor, store in wanted:
                view = piece.of(tensor)
                staged = slot.take((piece, key), tuple(view.shape), view.dtype)
                transfers.append(store.begin_read(_region(store, piece, tensor), staged.buffer, staged.offset))
        return transfers

    @torch.no_grad()
    def compute(self, block: StepBlock) -> None:
        """Step on one block: the next of `blocks`."""
        slot = self._pipeline.next() if block.on_disk and self._pipeline is not None else None
        params: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        stand_ins: dict[WeightPiece, Tensor] = {}
        for piece in block.pieces:
            if piece.master.tensor.grad is not None:
                stand_ins[piece] = self._stand_in(piece, slot)
                params[self._place[id(piece.master.tensor)][0]].append(stand_ins[piece])
        if stand_ins:
            self.owner.raw_step(params)
        writes: list[Transfer] = []
        for piece, stand_in in stand_ins.items():
            writes += self._keep_states(piece, stand_in, slot)
            writes += self._publish(piece, local(stand_in), slot)
        if slot is not None and self._pipeline is not None:
            self._pipeline.release(slot, writes)

    def _stand_in(self, piece: WeightPiece, slot: Slot | None) -> Tensor:
        """Return a tensor that the optimizer steps on in place of a piece, with its gradient and states."""
        master, staged = piece.master, {} if slot is None else slot.staged
        weight = staged[piece, _WEIGHT].tensor if (piece, _WEIGHT) in staged else piece.of(master.part)
        assert master.tensor.grad is not None
        gradient = piece.of(local(master.tensor.grad))
        if (piece, _GRADIENT) in staged:
            gradient = staged[piece, _GRADIENT].tensor
        if self.factor is not None:
            torch._foreach_mul_([gradient], self.factor)
        as_shard = isinstance(master.tensor, DTensor) and not self.owner.elementwise
        made = master.wrapped(weight) if as_shard else weight.detach()
        made.grad = master.wrapped(gradient) if as_shard else gradient
        position = self._place[id(master.tensor)][1]
        made.noise_id = getattr(master.tensor, "noise_id", position * NOISE_STRIDE)  # type: ignore[attr-defined]
        if self._before[master]:
            self.optimizer.state[made] = {
                key: self._state(piece, key, value, staged, as_shard) for key, value in self._before[master].items()
            }
        return made

    def _state(self, piece: WeightPiece, key: str, value: Any, staged: dict[Any, Staged], as_shard: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (piece, key) in staged:
            return _as(value, staged[piece, key].tensor) if as_shard else staged[piece, key].tensor
        if not _is_array(value):
            # Each piece of a weight counts its own step.
            return value if piece.is_whole else value.clone()
        return value if as_shard else piece.of(local(value))

    def _keep_states(self, piece: WeightPiece, stand_in: Tensor, slot: Slot | None) -> list[Transfer]:
        """Move the states of a stand-in to its weight, and begin to write those that live on disk."""
        master, writes = piece.master, []
        known, kept = self._before[master], self._after[master]
        for key, value in self.optimizer.state.pop(stand_in, {}).items():
            if not _is_array(value):
                kept[key] = value
                continue
            part = local(value)
            if master.store is None:
                self._keep_in_memory(piece, key, value)
                continue
            assert slot is not None
            staged = slot.staged.get((piece, key))
            if staged is None or staged.tensor.data_ptr() != part.data_ptr():
                staged = slot.take((piece, key), tuple(part.shape), part.dtype)
                staged.tensor.copy_(part)
            if key in known:
                kept[key] = known[key]
            elif key not in kept:
                shape = part.shape if piece.is_whole else master.part.shape
                kept[key] = _wrapped(master, value, master.store.empty(shape, part.dtype))
            region = _region(master.store, piece, local(kept[key]))
            writes.append(master.store.begin_write(region, staged.buffer, staged.offset))
        if piece.is_last:
            self.optimizer.state[master.tensor] = self._after.pop(master)
        return writes

    def _keep_in_memory(self, piece: WeightPiece, key: str, value: Tensor) -> None:
        known, kept, part = self._before[piece.master], self._after[piece.master], local(value)
        if key in known:
            kept[key] = known[key]
            if piece.of(local(known[key])).data_ptr() != part.data_ptr():
                piece.of(local(known[key])).copy_(part)
        elif piece.is_whole:
            kept[key] = _wrapped(piece.master, value)
        else:
            if key not in kept:
                kept[key] = piece.master.wrapped(torch.empty(piece.master.part.shape, dtype=part.dtype))
            piece.of(local(kept[key])).copy_(part)

    def _publish(self, piece: WeightPiece, weight: Tensor, slot: Slot | None) -> list[Transfer]:
        """Send a new weight to where the device reads it, and begin to write it where it lives on disk.

        A streamed weight whose master holds only some rows waits for those of other ranks (`gather_sources`).
        """
        master, writes = piece.master, []
        staged = None if slot is None else slot.staged.get((piece, _WEIGHT))
        if staged is not None and master.store is not None:
            region = _region(master.store, piece, master.part)
            writes.append(master.store.begin_write(region, staged.buffer, staged.offset))
        streamed = master.home.streamed_weight(master)
        if streamed is None:
            piece.of(master.device_part).copy_(weight.to(master.device, non_blocking=True))
            if slot is not None and master.device.type == "cuda":
                slot.sent = torch.cuda.current_stream(master.device).record_event()
        elif not streamed.is_master and master.first is None:
            writes += self._publish_source(piece, weight, streamed, slot)
        if piece.is_last:
            master.sent()
        return writes

    def _publish_source(self, piece: WeightPiece, weight: Tensor, streamed: Any, slot: Slot | None) -> list[Transfer]:
        if streamed.store is None:
            piece.of(streamed.source).copy_(weight)
        elif slot is None:
            streamed.store.write(streamed.source, weight)
        else:
            staged = slot.take((piece, _SOURCE), tuple(weight.shape), streamed.source.dtype)
            staged.tensor.copy_(weight)
            region = _region(streamed.store, piece, streamed.source)
            return [streamed.store.begin_write(region, staged.buffer, staged.offset)]
        return []

    def finish(self) -> None:
        """Wait for the writes; warn if the disk was far behind its rate."""
        if self._pipeline is not None:
            self._pipeline.finish()
        for store, (moved, busy) in self._meters:
            now, seconds = store.io.meter.now()
            if store.expected is not None:
                warn_if_slow(store.folder, now - moved, seconds - busy, store.expected)


def state_bytes_per_element(optimizer: Optimizer, raw: Callable[[Optimizer], Any]) -> float:
    """Return the bytes of optimizer states for each element of a matrix, by a step of a copy on a small one.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> [state_bytes_per_element(o, inspect.unwrap(type(o).step)) for o in (torch.optim.AdamW([weight]),)]
    [8.0]
    """
    most = 0.0
    for group in optimizer.param_groups:
        probe, weight = object.__new__(type(optimizer)), torch.zeros(2, 256)
        probe.__dict__.update(optimizer.__dict__)
        weight.grad = torch.zeros_like(weight)
        weight.noise_id = 0  # type: ignore[attr-defined]
        settings = {key: value for key, value in group.items() if key != "params"}
        probe.param_groups = [{**settings, "capturable": False, "params": [weight]}]
        probe.state = defaultdict(dict)
        with torch.no_grad():
            raw(probe)
        held = [one for one in probe.state[weight].values() if _is_array(one)]
        most = max(most, sum(one.nbytes for one in held) / weight.numel())
    return most


def _region(store: Any, piece: WeightPiece, tensor: Tensor) -> Region:
    """Return where a piece of a kept tensor lies."""
    region: Region = store.region_of(tensor)
    if piece.is_whole:
        return region
    size = tensor.element_size()
    return region.slice(piece.start * size, (piece.stop - piece.start) * size)


def _is_array(value: Any) -> bool:
    """Whether a state has a value for each element, or row, or block of elements; others are counters."""
    return isinstance(value, Tensor) and value.dim() > 0 and local(value).numel() > 1


def _as(value: Tensor, part: Tensor) -> Tensor:
    """Return a local tensor with the placements of another."""
    if not isinstance(value, DTensor):
        return part
    made: Tensor = DTensor(part, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def _wrapped(master: MasterWeight, value: Tensor, part: Tensor | None = None) -> Tensor:
    """Return a new state with the placements that a checkpoint reshards it by."""
    part = local(value) if part is None else part
    if isinstance(value, DTensor):
        return _as(value, part)
    return master.wrapped(part) if part.shape == master.part.shape else part
