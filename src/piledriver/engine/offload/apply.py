"""Offload optimizer states and fp32 master weights to host memory or disk; with `parameters`, the weights too.

The device keeps weights in the compute dtype; gradients are copied to the host during the backward; the optimizer,
whose groups hold the master weights, steps there with its fused CPU kernel; new weights are copied back. The optimizer
object and its state dict stay, and the model's state dict holds the master weights: checkpoints move between runs with
and without offload.

With zero 3 on several ranks each holds the masters of its shards. Streamed shards are this module's too
(`ShardStream`), but for those in host memory whose optimizer steps there on all of them at once: then the shards are
the masters, and torch's offload policy brings them. With zero 1 and 2 each rank holds the masters of the rows that it
steps on; streamed weights are whole on each, and are written anew by block after a step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from piledriver.engine.blocks import blocks_of
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh
from piledriver.engine.meta_init import put
from piledriver.engine.offload import OFFLOADED, offloaded
from piledriver.engine.offload.freed_memory import return_freed_memory
from piledriver.engine.offload.gradients import GradientStream
from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.places import Places
from piledriver.engine.offload.stepping.replace_step import step_by_block
from piledriver.engine.offload.stream.parameter_block import StreamedParameter, StreamHome
from piledriver.engine.offload.stream.row_gather import gather_sources
from piledriver.engine.offload.stream.shard_stream import ShardStream
from piledriver.engine.offload.stream.training_stream import TrainingStream, streamed_parameters
from piledriver.engine.precision import compute_dtype
from piledriver.engine.shards.owned_rows import gather_rows, is_expert
from piledriver.engine.torch_private import replace_local
from piledriver.optim.shards import local


class Offloaded:
    """The master weights of a model on the host or on disk, with their transfers."""

    def __init__(self, model: nn.Module, layout: Layout, device: torch.device, axis: DeviceMesh | None = None) -> None:
        return_freed_memory()
        dtype = compute_dtype(layout) if layout.precision != "fp16" else None
        self.tiers, self.axis, self.dtype = layout.tiers, axis, dtype
        blocks = list(blocks_of(model).values()) if layout.streams_parameters else []
        streamed = {parameter for block in streamed_parameters(blocks) for parameter in block}
        places = Places(model, self.tiers, streamed, compute_dtype=dtype, has_all_rows=axis is None)
        self.store = places.store
        self.spare_gradients: dict[torch.Size, list[Tensor]] = {}
        """Memory of gradients that were applied in the backward, by shape."""
        self.masters: dict[nn.Parameter, MasterWeight] = {}
        for parameter in places.offloaded:
            self.masters[parameter] = MasterWeight(
                parameter,
                device,
                home=self,
                store=self.store if parameter in places.on_disk else None,
                gradient_store=self.store if parameter in places.gradient_on_disk else None,
                pin=self.tiers.pin,
            )
            if dtype is not None and parameter.dim() > 1 and not isinstance(parameter, DTensor):
                # Vectors (norms, biases) stay fp32.
                parameter.data = parameter.data if parameter in streamed else parameter.data.to(dtype)
        self.stream: TrainingStream | ShardStream | None = None
        if layout.streams_parameters:
            home = StreamHome(device, dtype, places.source_on_disk, self.store)
            of_shards = any(hasattr(block, "_get_fsdp_state") for block in blocks)
            self.stream = (ShardStream if of_shards else TrainingStream)(blocks, self.masters, home)
            streaming = self.stream.weights
            for parameter in model.parameters():
                if parameter not in streaming:
                    # Not the master weight itself, where that is the weight that was made on the host or in a file.
                    _move(parameter, device, copy=parameter in self.masters)
            _move_buffers(model, device)
        if self.store is not None:
            self.store.settle()
        self._streamed = {} if self.stream is None else self.stream.weights
        self.gradients = GradientStream(
            list(self.masters.values()),
            are_reduced_first=axis is not None,
            most_bytes=self.tiers.buffers * self.tiers.buffer_bytes,
        )
        self.handles: list[Any] = []

    @property
    def steps_by_block(self) -> bool:
        """Whether the optimizer steps block by block and sends weights itself."""
        return self.tiers.steps_by_block or self.axis is not None

    def streamed_weight(self, master: MasterWeight) -> StreamedParameter | None:
        """Return the streamed weight of a master, None for a weight that stays on the device."""
        return self._streamed.get(master.parameter)

    def send(self, *, only_stale: bool = False) -> None:
        """Copy new weights to the device, or to the source of streamed blocks."""
        due = [master for master in self.masters.values() if master.is_stale or not only_stale]
        if due:
            self.evict()
        for master in due:
            if (streamed := self.streamed_weight(master)) is None:
                master.send()
            elif self.axis is None:
                streamed.refresh()
        if due and self.axis is not None:
            # Ranks load together: each has the rows that it steps on.
            kept = [one.parameter for one in due if self.streamed_weight(one) is None and not is_expert(one.parameter)]
            for dtype in dict.fromkeys(parameter.dtype for parameter in kept):
                gather_rows([parameter for parameter in kept if parameter.dtype == dtype], self.axis)
            self._gather_streamed(due)

    def finish_step(self) -> None:
        """Zero 1 and 2: write the rows that all ranks have stepped on to the sources of streamed weights."""
        self._gather_streamed([master for master in self.masters.values() if master.tensor.requires_grad])

    def _gather_streamed(self, masters: list[MasterWeight]) -> None:
        if self.axis is not None and isinstance(self.stream, TrainingStream):
            gather_sources(self.stream, self.axis, set(masters))

    def drop(self) -> None:
        """Reset after a failed step: finish all transfers."""
        self.gradients.settle()
        self.evict()

    def evict(self) -> None:
        """Free the device memory of streamed blocks, whose weights change."""
        if self.stream is not None:
            self.stream.evict_all()

    @torch.no_grad()
    def release(self) -> None:
        """Move the master weights back into the model: in host memory if blocks were streamed, else on its device."""
        self.send(only_stale=True)
        self.gradients.close()
        if self.stream is not None:
            self.stream.release()
        for parameter, master in self.masters.items():
            streamed = self.streamed_weight(master)
            if master.first is not None:
                # The master holds some of the rows.
                parameter.data = parameter.data if streamed is None else streamed.source
            elif isinstance(self.stream, TrainingStream):
                parameter.data = master.tensor.detach()
            elif parameter.dtype != master.tensor.dtype and not isinstance(master.tensor, DTensor):
                parameter.data = master.tensor.detach().to(parameter.device)
            del parameter.on_host  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def offload_policy(layout: Layout, device_type: str) -> OffloadPolicy:
    """Return the offload policy of `fully_shard`; memory is pinned if there is a GPU."""
    if not layout.streams_parameters or streams_shards(layout):
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def holds_rows(mesh: Mesh) -> bool:
    """Return whether ranks hold the masters of the rows that they step on (zero 1 and 2 with data parallelism)."""
    return mesh.layout.zero in (1, 2) and not mesh.alone and mesh.reduce_size > 1


def streams_shards(layout: Layout) -> bool:
    """Return whether shards of zero 3 are streamed by `ShardStream`; torch's policy only knows masters on the host."""
    return layout.tiers.parameters == "disk" or (layout.streams_parameters and layout.tiers.steps_by_block)


def offload_weights(model: nn.Module, mesh: Mesh, device: torch.device) -> nn.Module:
    """Move a model's master weights (and weights) to their tier, in place. Before its optimizers are offloaded."""
    layout = mesh.layout
    by_rows = holds_rows(mesh)
    is_sharded = not by_rows and any(isinstance(p, DTensor) for p in model.parameters())
    if layout.streams_parameters and is_sharded and not streams_shards(layout):
        # `offload_policy` keeps the sharded parameters on the host.
        _move_buffers(model, device)
        return model
    made = Offloaded(model, layout, device, mesh.shard_group if by_rows else None)
    model.__dict__[OFFLOADED] = made
    # Before the hook that gathers shards.
    handles = [model.register_forward_pre_hook(_SendLoadedWeights(made), prepend=True)]
    model.zero_grad = _ZeroGrad(model)  # type: ignore[method-assign]
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            handles.append(module.register_state_dict_post_hook(_give_masters))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_pre_hook(_load_masters))  # type: ignore[no-untyped-call]
    made.handles = handles
    return model


def return_weights(model: nn.Module) -> None:
    """Undo `offload_weights`: the model holds its master weights itself."""
    made: Offloaded = offloaded(model)
    made.release()
    if made.stream is not None:
        _move_buffers(model, torch.device("cpu"))
    for handle in made.handles:
        handle.remove()
    del model.__dict__[OFFLOADED]


def _move(parameter: nn.Parameter, device: torch.device, *, copy: bool) -> None:
    if isinstance(parameter, DTensor):
        replace_local(parameter, local(parameter).detach().to(device, copy=copy))
    else:
        parameter.data = parameter.data.to(device, copy=copy)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers as `model.to(device)` does: modules without parameters may compute theirs anew on the device."""
    for module in model.modules():
        if not module._buffers:
            continue
        if not module._parameters:
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
            continue
        for buffer in module.buffers(recurse=False):
            buffer.data = buffer.data.to(device)


def offload_optimizer(optimizer: Optimizer) -> bool:
    """Make an optimizer step on the master weights of offloaded models, in place, with its states in their tier.

    Call it again when more of the optimizer's parameters were offloaded. Return whether it steps block by block, on
    local fp32 tensors, so that no other wrapper of the step is needed.
    """
    masters: list[MasterWeight] = []
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            master: MasterWeight | None = getattr(parameter, "on_host", getattr(parameter, "master_weight", None))
            if master is None:
                continue
            masters.append(master)
            group["params"][place] = master.tensor
            if parameter is not master.tensor and parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[master.tensor] = {key: _on_host(value) for key, value in state.items()}
    use_fused_on_host(optimizer)
    homes = list(dict.fromkeys(master.home for master in masters))
    for home in homes:
        optimizer.register_step_pre_hook(_Settle(home))
    if not any(home.steps_by_block for home in homes):
        for home in homes:
            optimizer.register_step_post_hook(_Send(home))
        return False
    step_by_block(optimizer, masters, homes)
    return True


def use_fused_on_host(optimizer: Optimizer) -> None:
    """Use torch's fused CPU kernel, which is much faster than its loop."""
    for group in optimizer.param_groups:
        if "fused" in group and all(one.device.type == "cpu" and one.is_floating_point() for one in group["params"]):
            group["fused"], group["foreach"] = True, False


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor):
        return value.cpu()
    return DTensor(local(value).cpu(), value._spec, requires_grad=False)  # type: ignore[no-untyped-call]


class _SendLoadedWeights:
    def __init__(self, offloaded: Offloaded) -> None:
        self.offloaded = offloaded

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        self.offloaded.send(only_stale=True)


class _Settle:
    def __init__(self, home: Offloaded) -> None:
        self.home = home

    def __call__(self, *_: Any) -> None:
        self.home.gradients.settle()


class _Send:
    def __init__(self, home: Offloaded) -> None:
        self.home = home

    def __call__(self, *_: Any) -> None:
        self.home.send()


class _ZeroGrad:
    """Clears the gradients of the masters too, for loops that call `model.zero_grad`."""

    def __init__(self, model: nn.Module) -> None:
        functools.update_wrapper(self, type(model).zero_grad)
        self.model = model

    def __call__(self, set_to_none: bool = True) -> None:
        type(self.model).zero_grad(self.model, set_to_none)
        for parameter in self.model.parameters():
            part = getattr(parameter, "optimizer_shard", None)
            if part is not None:
                part.grad = None


def _give_masters(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        master: MasterWeight | None = getattr(parameter, "on_host", None)
        known = state.get(prefix + name)
        if master is not None and known is not None:
            # `keep_vars` asks for the parameter itself.
            state[prefix + name] = master.tensor if known.requires_grad else master.tensor.detach()
            master.was_given_out = True


@torch.no_grad()
def _load_masters(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        master: MasterWeight | None = getattr(parameter, "on_host", None)
        came = state.get(prefix + name)
        if master is None or came is None or came.shape != master.tensor.shape:
            continue
        if master.first is not None:
            # The parameter is whole, and takes all rows.
            came = state[prefix + name] = came.full_tensor() if isinstance(came, DTensor) else came
            put(master.tensor.detach(), came)
        else:
            master.tensor.copy_(came)
        master.was_given_out = True
        storage = local(parameter).untyped_storage()
        if storage.nbytes() == 0:
            # torch will copy into the evicted weight, which needs memory; the next forward evicts it again.
            storage.resize_(local(parameter).nbytes)
