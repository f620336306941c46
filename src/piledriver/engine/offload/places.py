"""Decide which tensors of a model live on disk, and reserve the files for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.engine.offload.disk.block_file import DiskStore
from piledriver.engine.offload.disk.host_buffer import whole_pages
from piledriver.engine.offload.disk.rate import measure_rate
from piledriver.engine.tiers import Offload
from piledriver.optim.shards import local

STORE = "_offload_store"
"""The attribute of a model that holds the store of its parameters, where they were allocated on disk."""
# Below this a measured rate would say little, and a slow disk cost little.
_WORTH_MEASURING = 1 << 30


class Places:
    """The tier of each parameter of a model. Vectors are small and stay in memory."""

    def __init__(
        self,
        model: nn.Module,
        tiers: Offload,
        streamed: set[nn.Parameter],
        *,
        compute_dtype: torch.dtype | None,
        has_all_rows: bool = True,
    ) -> None:
        """Reserve files for masters, and for streamed weights that are not the masters themselves.

        These are weights in a compute dtype, and those whose master holds only some of the rows (zero 1 and 2).
        """
        held = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        matrices = [parameter for parameter in held if parameter.dim() > 1]
        far = spread_share(matrices, tiers.optimizer_share)
        self.offloaded = held
        """Parameters with a master weight."""
        if tiers.optimizer == "host" and tiers.optimizer_share < 1.0:
            self.offloaded = [parameter for parameter in held if parameter in far]
        self.on_disk = far if tiers.optimizer == "disk" else set()
        """Parameters whose master weight and states live in files."""
        self.gradient_on_disk = set(matrices) & set(self.offloaded) if tiers.gradients == "disk" else set()
        self.source_on_disk: set[nn.Parameter] = set()
        """Streamed parameters whose copy in the compute dtype lives in a file."""
        if tiers.parameters == "disk":
            self.source_on_disk = spread_share([one for one in matrices if one in streamed], tiers.parameters_share)
        made: DiskStore | None = model.__dict__.pop(STORE, None)
        self.store: DiskStore | None = None
        if tiers.uses_disk:
            # Whole weights in files are freed where the masters are only some of their rows.
            self.store = made if made is not None and has_all_rows else open_store(tiers)
            dtype = compute_dtype or (None if has_all_rows else torch.float32)
            self._reserve(self.store, tiers, 0 if dtype is None else dtype.itemsize)

    def _reserve(self, store: DiskStore, tiers: Offload, source_bytes: int) -> None:
        new = [one for one in self.on_disk if store.find(local(one).detach()) is None]
        nbytes = sum(whole_pages(4 * _local_size(one)) for one in [*new, *self.gradient_on_disk])
        nbytes += sum(whole_pages(source_bytes * local(one).numel()) for one in self.source_on_disk)
        if nbytes >= _WORTH_MEASURING and tiers.folder is not None:
            store.expected = measure_rate(tiers.folder)
        store.reserve(nbytes)


def open_store(tiers: Offload) -> DiskStore:
    """Return a store in the folder of a tier."""
    assert tiers.folder is not None
    return DiskStore(tiers.folder, pin=tiers.pin)


def allocate_on_disk(model: nn.Module, tiers: Offload) -> Callable[[Tensor], Tensor | None]:
    """Return what allocates the matrices of a model on the meta device in files, which `Places` then takes over."""
    matrices = [one for one in model.parameters() if one.is_floating_point() and one.dim() > 1]
    store = model.__dict__[STORE] = open_store(tiers)
    store.reserve(sum(whole_pages(local(one).nbytes) for one in matrices))

    def allocate(tensor: Tensor) -> Tensor | None:
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return None
        part = store.empty(local(tensor).shape, tensor.dtype)
        return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part  # type: ignore[no-untyped-call]

    return allocate


def spread_share(parameters: Iterable[nn.Parameter], share: float) -> set[nn.Parameter]:
    """Return parameters with at most this share of all elements, evenly over the model.

    >>> weights = [nn.Parameter(torch.empty(2, 2)) for _ in range(6)]
    >>> chosen = spread_share(weights, 0.5)
    >>> [weight in chosen for weight in weights]
    [False, True, False, True, False, True]
    """
    chosen: set[nn.Parameter] = set()
    taken = seen = 0
    for parameter in parameters:
        size = _local_size(parameter)
        seen += size
        if taken + size <= share * seen:
            chosen.add(parameter)
            taken += size
    return chosen


def _local_size(parameter: nn.Parameter) -> int:
    return local(getattr(parameter, "optimizer_shard", parameter)).numel()
