"""The cost of any module with an example input, without running it: traced on fake tensors.

Eager: autograd's saved tensors. Compiled: what the compiler's min-cut partitioner keeps. Parameters and inputs that are
kept cost nothing more. Both count by storage, so that views are counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from piledriver.plan.blocks.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    aot_function,
    make_boxed_func,
    min_cut_rematerialization_partition,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from piledriver.plan.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class TracedCost:
    """What one call of a module costs, forward and backward."""

    parameters: int
    """Elements that are trained."""
    parameter_bytes: int
    kept: dict[str, float] = field(default_factory=dict)
    """Bytes kept for the backward, by shape and dtype."""
    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    bytes_moved: float = 0.0
    """Bytes that operators read and write, forward and backward, as eager kernels would."""
    kernels: int = 0
    compiled: bool = False

    @property
    def kept_bytes(self) -> float:
        """Bytes kept for the backward."""
        return sum(self.kept.values())


def trace_module(
    module: nn.Module, *args: Any, compiled: bool = False, loss: Callable[[Any], Tensor] | None = None, **kwargs: Any
) -> TracedCost:
    """Return the cost of one training call of a module on these inputs; nothing is computed.

    The module and the inputs may be on the meta device. `loss` reduces the output to a number (default: the sum of all
    floating-point outputs). Raises `PlanError` if the module cannot be traced.

    >>> cost = trace_module(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8))
    >>> cost.parameters, int(cost.kept_bytes), int(cost.matmul_flops)
    (72, 128, 1024)
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            state = {name: _fake(mode, tensor) for name, tensor in _state(module)}
            leaves, shape = tree_flatten((args, kwargs))
            inputs = [_fake(mode, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            call = _Call(module, list(state), shape, loss or _sum)
            return _trace(call, state, inputs, compiled)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"{type(module).__name__} cannot be traced: {type(error).__name__}: {str(error).splitlines()[0][:160]}",
            fix="give an example of its real inputs, and no code that reads their values",
        ) from error


class _Call:
    """A module as a function of flat tensors: its state, then its inputs."""

    def __init__(self, module: nn.Module, names: list[str], shape: Any, loss: Callable[[Any], Tensor]) -> None:
        self.module, self.names, self.shape, self.loss = module, names, shape, loss

    def __call__(self, state: Sequence[Tensor], inputs: Sequence[Any]) -> Tensor:
        args, kwargs = tree_unflatten(list(inputs), self.shape)
        named = dict(zip(self.names, state, strict=True))
        return self.loss(torch.func.functional_call(self.module, named, args, kwargs))


def _trace(call: _Call, state: Mapping[str, Tensor], inputs: list[Any], compiled: bool) -> TracedCost:
    trained = [tensor for tensor in state.values() if tensor.requires_grad]
    traffic = _Traffic()
    flops = FlopCounterMode(display=False)
    kept = _Kept([*state.values(), *(one for one in inputs if isinstance(one, Tensor))])
    with flops, traffic, torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, _identity):
            out = call(list(state.values()), inputs)
        torch.autograd.grad(out, trained, allow_unused=True)
    found = dict(kept.named())
    if compiled:
        found = _kept_by_partitioner(call, list(state.values()), inputs)
    products, attention = _by_class(flops)
    return TracedCost(
        parameters=sum(tensor.numel() for tensor in trained),
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in trained),
        kept=found,
        matmul_flops=products,
        attention_flops=attention,
        bytes_moved=traffic.bytes,
        kernels=traffic.calls,
        compiled=compiled,
    )


def _is_of_input(node: Any) -> bool:
    """Whether a node is an input of the graph or a view of one, which keeps nothing more alive."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        node = node.args[0]
    return bool(node.op == "placeholder")


class _Kept:
    """Storages that autograd saves, without those of parameters and inputs."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.given = {_key(tensor) for tensor in given}
        self.found: dict[Any, tuple[str, float]] = {}
        self.alive: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a saved tensor."""
        key = _key(tensor)
        if key not in self.given and key not in self.found:
            # Held, so that no later storage gets its address.
            self.alive.append(tensor)
            self.found[key] = _name(tensor), float(tensor.untyped_storage().nbytes())
        return tensor

    def named(self) -> dict[str, float]:
        """Return the bytes by shape and dtype."""
        return _summed(self.found.values())


def _kept_by_partitioner(call: _Call, state: list[Tensor], inputs: list[Any]) -> dict[str, float]:
    """Return what the min-cut partitioner keeps between the two graphs, by shape and dtype."""
    saved: list[tuple[str, float]] = []
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    places = [index for index, one in enumerate(inputs) if isinstance(one, Tensor)]

    def function(*flat: Tensor) -> Tensor:
        given = list(inputs)
        for place, tensor in zip(places, flat[len(state) :], strict=True):
            given[place] = tensor
        return call(flat[: len(state)], given)

    def partition(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        (results,) = next(node for node in forward.graph.nodes if node.op == "output").args
        for node in results[num_fwd_outputs:]:
            value = getattr(node, "meta", {}).get("val")
            if isinstance(value, Tensor) and not _is_of_input(node):
                saved.append((_name(value), float(value.numel() * value.element_size())))
        return forward, backward

    made = aot_function(function, fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=partition)
    made(*[one.detach().requires_grad_(one.requires_grad) for one in state], *tensors).backward()
    return _summed(saved)


# Untyped in torch.
_Mode: Any = TorchDispatchMode


class _Traffic(_Mode):  # type: ignore[misc]
    """Counts the bytes that operators read and write, and the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        written = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        if any(_key(one) not in read for one in written):
            self.calls += 1
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            self.bytes += sum(one.numel() * one.element_size() for one in (*given, *written))
        return out


def _by_class(counter: FlopCounterMode) -> tuple[float, float]:
    products = attention = 0.0
    for operator, count in counter.get_flop_counts().get("Global", {}).items():
        name = str(operator).rsplit(".", 1)[-1]
        if "attention" in name:
            attention += count
        else:
            products += count
    return products, attention


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _fake(mode: Any, tensor: Tensor) -> Tensor:
    with torch.no_grad():
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else made


def _sum(out: Any) -> Tensor:
    """Return one number: the loss of an output that has one, or the sum of its floating-point tensors."""
    given = getattr(out, "loss", None)
    if isinstance(given, Tensor):
        return given
    leaves = [one for one in tree_leaves(out) if isinstance(one, Tensor) and one.is_floating_point()]
    if not leaves:
        raise PlanError("the module returns no floating-point tensor", fix="pass loss=, a function of its output")
    return torch.stack([one.float().sum() for one in leaves]).sum()


def _summed(pairs: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, size in pairs:
        found[name] = found.get(name, 0.0) + size
    return found


def _name(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _as_it_is(gm: Any, example_inputs: Any) -> Any:
    return make_boxed_func(gm.forward)
