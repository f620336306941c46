"""FLOPs and bytes of an operator, from the shapes in a trace and torch's registry of FLOP formulas."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.utils.flop_counter import flop_registry

from piledriver.observe.flops import CPU_ATTENTION
from piledriver.observe.trace.chrome import HostEvent

_SIZES = {
    "double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "long": 8, "long int": 8, "int": 4, "short": 2,
    "short int": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip
_OFFSETS = frozenset({"cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k"})
# Operators that change no bytes: they return another view, or only call other operators.
_VIEWS = frozenset(
    "aten::" + name
    for name in (
        "view", "t", "transpose", "permute", "expand", "as_strided", "slice", "select", "unsqueeze", "squeeze",
        "reshape", "_unsafe_view", "_reshape_alias", "detach", "detach_", "alias", "split", "split_with_sizes", "chunk",
        "unbind", "narrow", "empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "unflatten",
        "flatten", "view_as", "expand_as", "numpy_T", "lift_fresh", "resolve_conj", "resolve_neg", "result_type",
    )
)  # fmt: skip


class Boundaries(Protocol):
    """Knows where the documents of packed batches begin."""

    def at(self, time: float, count: int, tokens: int) -> torch.Tensor | None:
        """Return the boundaries at a time, by how many there are and the tokens they divide; None if unknown."""
        ...


def operator_flops(event: HostEvent, unknown: Counter[str] | None = None, boundaries: Boundaries | None = None) -> int:
    """Return the FLOPs of an operator by torch's formula for its shapes; 0 if torch has none.

    `unknown` counts operators with a formula that the trace's shapes are not enough for: attention over documents of
    different lengths, if their `boundaries` are not known.
    """
    formula = _formula(event.name)
    if formula is None:
        return 0
    dims = event.args.get("Input Dims")
    if dims is None:
        return 0
    arguments = _arguments(event)
    if boundaries is not None:
        _put_boundaries(event, arguments, boundaries)
    for given in (arguments, [_Shape(one) if isinstance(one, torch.Size) else one for one in arguments]):
        try:
            return int(formula(*given, out_val=_output(event.name, arguments)))
        except Exception:  # formulas assert and index whatever they need; some take tensors, some shapes
            continue
    if unknown is not None:
        unknown[event.name] += 1
    return 0


def has_formula(name: str) -> bool:
    """Return whether torch counts FLOPs of an operator."""
    return _formula(name) is not None


def has_output_argument(event: HostEvent) -> bool:
    """Return whether an operator writes into a tensor that its caller gave it (`out=`)."""
    given = sum(kind in _SIZES for kind in event.args.get("Input type", ()))
    return given > _tensors(event.name)


def operator_bytes(event: HostEvent, allocated: int) -> int:
    """Return the bytes that an operator reads and writes: each input once, and its outputs.

    `allocated` are the bytes that the allocator gave it. An operator in place writes its first input.
    """
    if event.name in _VIEWS or not event.args.get("Input Dims"):
        return 0
    sizes = [
        _count(dims) * _SIZES.get(kind, 0)
        for dims, kind in zip(event.args["Input Dims"], event.args.get("Input type", ()), strict=False)
    ]
    written = allocated
    if not written and sizes and event.name.endswith("_"):
        written = sizes[0]
    return sum(sizes) + written


def matmul_precision(event: HostEvent) -> str | None:
    """Return the type of the first tensor of a product, attention or convolution, as torch names it; else None."""
    if not has_formula(event.name):
        return None
    names = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64"}
    kinds = [kind for kind in event.args.get("Input type", ()) if kind in _SIZES]
    return names.get(kinds[0], kinds[0]) if kinds else None


def _count(dims: Any) -> int:
    if not isinstance(dims, list) or not dims:
        return 0
    if isinstance(dims[0], list):  # a list of tensors
        return sum(map(_count, dims))
    total = 1
    for size in dims:
        total *= int(size)
    return total


@lru_cache(maxsize=4096)
def _packet(name: str) -> Any:
    space, _, short = name.partition("::")
    if not short or not short.isidentifier():
        return None
    try:
        return getattr(getattr(torch.ops, space), short)
    except (AttributeError, RuntimeError):
        return None


@lru_cache(maxsize=4096)
def _formula(name: str) -> Any:
    packet = _packet(name)
    return CPU_ATTENTION.get(packet) or flop_registry.get(packet)


@lru_cache(maxsize=4096)
def _positional(name: str) -> int:
    """Return how many arguments formulas take by position; the trace lists keywords and outputs after them."""
    schemas = [getattr(_packet(name), overload)._schema for overload in _packet(name).overloads()[:1]]
    return sum(not one.kwarg_only for one in schemas[0].arguments) if schemas else 99


def _put_boundaries(event: HostEvent, arguments: list[Any], boundaries: Boundaries) -> None:
    """Replace the shapes of cu_seqlens by their values."""
    names = _names(event.name)
    for index, name in enumerate(names[: len(arguments)]):
        if name not in _OFFSETS or not isinstance(arguments[index], torch.Size) or not arguments[index]:
            continue
        side = names.index("query" if name.endswith("q") else "key")
        # Tokens are the first dimension of flash attention, and the second of the other kernel.
        tokens = arguments[side][0] if len(arguments[side]) == 3 else arguments[side][1]
        found = boundaries.at(event.start, arguments[index][0], tokens)
        arguments[index] = found if found is not None else arguments[index]
    if any(isinstance(one, torch.Tensor) for one in arguments):
        # Queries that share key heads: the work is that of the queries'.
        heads = arguments[names.index("query")][-2]
        for name in ("key", "value"):
            shape = arguments[names.index(name)]
            arguments[names.index(name)] = torch.Size([*shape[:-2], heads, shape[-1]])


@lru_cache(maxsize=4096)
def _names(name: str) -> list[str]:
    packet = _packet(name)
    return [one.name for one in getattr(packet, packet.overloads()[0])._schema.arguments]


@lru_cache(maxsize=4096)
def _tensors(name: str) -> int:
    packet = _packet(name)
    if packet is None:
        return 99
    schema = getattr(packet, packet.overloads()[0])._schema
    return sum("Tensor" in str(one.type) for one in schema.arguments if not one.kwarg_only)


def _output(name: str, arguments: list[Any]) -> Any:
    """Return the output's shape of a convolution, which its formula needs and the trace does not hold."""
    if "convolution" not in name or name.endswith("overrideable"):
        return None
    if name.endswith("backward"):
        return [arguments[1], arguments[2], arguments[3]]
    image, weight, _, stride, padding, dilation, transposed, *rest = arguments
    sizes = []
    for dim in range(len(image) - 2):
        window = dilation[dim] * (weight[dim + 2] - 1)
        if transposed:
            extra = rest[0][dim] if rest else 0
            sizes.append((image[dim + 2] - 1) * stride[dim] - 2 * padding[dim] + window + extra + 1)
        else:
            sizes.append((image[dim + 2] + 2 * padding[dim] - window - 1) // stride[dim] + 1)
    groups = rest[1] if len(rest) > 1 else 1
    return torch.Size([image[0], weight[1] * groups if transposed else weight[0], *sizes])


class _Shape:
    """Stands for a tensor in a formula: only its shape is asked for."""

    __slots__ = ("shape",)

    def __init__(self, dims: Sequence[int]) -> None:
        self.shape = torch.Size(dims)


def _arguments(event: HostEvent) -> list[Any]:
    """Return shapes for tensors and values for the rest, as the formulas take them."""
    dims, kinds = event.args["Input Dims"], event.args.get("Input type", ())
    values = event.args.get("Concrete Inputs", [""] * len(dims))
    found: list[Any] = []
    for index, one in enumerate(dims):
        kind = kinds[index] if index < len(kinds) else ""
        if kind in _SIZES or (one and kind != "ScalarList" and kind != "Scalar"):
            found.append(torch.Size(one))
            continue
        text = str(values[index]) if index < len(values) else ""
        try:
            found.append(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            found.append(None)
    return found[: _positional(event.name)]
