"""Quantised layers of checkpoint folders: compressed-tensors, GPTQ, AWQ, fp8 with blocks, bitsandbytes NF4.

A layer `X` is stored as several tensors (`X.weight_packed`, `X.weight_scale`, ...). `StoredTensors` shows a folder
under the names of dense checkpoints: `X.weight` is decoded when it is read. Layers that our kernels can compute with
are read as codes and a `WeightGrid`, the others as dense weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piledriver.core.errors import CorruptFileError
from piledriver.kernels.linear import GROUPS, WeightGrid
from piledriver.models.interchange.errors import InterchangeError

Get = Callable[[str], Tensor]
_SUFFIXES = {
    "compressed-tensors": (
        *("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        "input_scale",
    ),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "fp8": ("weight", "weight_scale_inv"),
    "bitsandbytes": (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        "weight.quant_state.bitsandbytes__nf4",
    ),
}
_MARKS = {
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "gptq": ("qweight",),
    "awq": ("qweight",),
    "fp8": ("weight_scale_inv",),
    "bitsandbytes": ("weight.quant_state.bitsandbytes__nf4",),
}
_CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def check_quantisation(settings: Any) -> None:
    """Raise `InterchangeError` unless `quantization_config` of a config.json is one that can be read."""
    method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else settings
    if not isinstance(method, str) or method not in _SUFFIXES:
        raise InterchangeError(
            f"quantization_config: {method} is not supported",
            fix="load it with transformers (dequantize=True) and save it in bf16",
        )
    groups = _groups(settings) if method == "compressed-tensors" else []
    for group in groups:
        weights = group.get("weights") or {}
        if not isinstance(weights, Mapping) or weights.get("num_bits", 8) not in (4, 8):
            raise InterchangeError(f"weights {weights} are not supported", fix="use 4 or 8 bits")
    inputs = [group.get("input_activations") for group in groups]
    for one in filter(None, inputs):
        if not isinstance(one, Mapping) or not one.get("dynamic"):
            raise InterchangeError("static scales of activations are not supported", fix="use a dynamic scheme")
        grouped = one.get("strategy") == "group" and one.get("type") == "float"
        if one.get("num_bits") != 8 or not (grouped or one.get("strategy") in ("token", None)):
            raise InterchangeError(f"activations {one} are not supported", fix="use 8 bits, a scale for each token")
    if len({bool(group.get("input_activations")) for group in groups if _names_many(group)}) > 1:
        raise InterchangeError("layers that differ in the precision of inputs are not supported", fix="use one group")
    bits = settings.get("bits", settings.get("w_bit", 4))
    if method in ("gptq", "awq") and bits != 4:
        raise InterchangeError(f"{method} with {bits} bits is not supported", fix="use 4 bits")
    if method == "awq" and str(settings.get("version", "gemm")).lower() != "gemm":
        raise InterchangeError(f"awq version {settings['version']!r} is not supported", fix="use gemm")
    if method == "bitsandbytes" and not settings.get("load_in_4bit"):
        raise InterchangeError("bitsandbytes int8 is not supported", fix="use NF4, or save it dense")


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of layers of a compressed-tensors config."""
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise InterchangeError("config_groups that is not a table is not supported", fix="fetch config.json again")
    found = list(groups.values())
    if not all(isinstance(group.get("targets", []), list) for group in found):
        raise InterchangeError("targets that are not a list are not supported", fix="fetch config.json again")
    return found


def _names_many(group: Mapping[str, Any]) -> bool:
    """Return whether a group of layers is given by a class or a pattern, and not only by the names of layers."""
    targets = [str(target) for target in group.get("targets") or ("Linear",)]
    return any(target.startswith("re:") or target[:1].isupper() for target in targets)


class Codes(NamedTuple):
    """A quantised weight of [rows, columns] before packing."""

    grid: WeightGrid
    values: Tensor
    """Codes of `WeightGrid`, [rows, columns]."""


class StoredTensors:
    """The tensors of a folder by the names of dense checkpoints."""

    def __init__(self, theirs: Mapping[str, Any], names: set[str], get: Get) -> None:
        self.settings: Mapping[str, Any] = theirs.get("quantization_config") or {}
        self.method = str(self.settings.get("quant_method", "")) if self.settings else ""
        self.names, self.get = names, get
        if self.settings:
            check_quantisation(self.settings)

    def parts(self, name: str) -> list[str]:
        """Return the stored tensors of a dense tensor; an empty list if there are none."""
        prefix = self._layer(name)
        if prefix is None:
            return [name] if name in self.names else []
        stored = [f"{prefix}.{suffix}" for suffix in _SUFFIXES[self.method]]
        return [part for part in stored if part in self.names]

    def dense(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor, decoded if it is quantised."""
        prefix = self._layer(name)
        if prefix is None:
            tensor = self.get(name)
            if self.method and tensor.dtype in _CODES:
                raise CorruptFileError(f"{name} is {tensor.dtype} without a scale", fix="fetch the checkpoint again")
            return tensor
        decoded = self._decode(prefix)
        if isinstance(decoded, Codes):
            return decoded.grid.values(decoded.values).to(dtype or decoded.grid.scales.dtype)
        return decoded

    def codes(self, name: str) -> Codes | None:
        """Return a weight as codes, or None if it is not quantised or not in a form that our kernels take."""
        prefix = self._layer(name)
        if prefix is None:
            return None
        decoded = self._decode(prefix)
        return decoded if isinstance(decoded, Codes) else None

    def is_dynamic(self, name: str) -> bool:
        """Return whether the inputs of a layer are quantised too, with a scale for each token."""
        groups = _groups(self.settings) if self.method == "compressed-tensors" else []
        own = [group for group in groups if name.removesuffix(".weight") in group.get("targets", [])]
        return any(group.get("input_activations") for group in own or filter(_names_many, groups))

    def _layer(self, name: str) -> str | None:
        """Return the layer of a dense name if it is quantised."""
        prefix = name.removesuffix(".weight")
        if not self.method or prefix == name:
            return None
        return prefix if any(f"{prefix}.{mark}" in self.names for mark in _MARKS[self.method]) else None

    def _decode(self, prefix: str) -> Codes | Tensor:
        def get(suffix: str) -> Tensor:
            if f"{prefix}.{suffix}" not in self.names:
                raise CorruptFileError(f"{prefix} has no tensor {suffix}", fix="fetch the checkpoint again")
            return self.get(f"{prefix}.{suffix}")

        def has(suffix: str) -> bool:
            return f"{prefix}.{suffix}" in self.names

        try:
            if self.method == "compressed-tensors":
                return _packed(get, has) if has("weight_packed") else _scaled(get, has)
            if self.method == "gptq":
                return _gptq(get, has, version_two=self.settings.get("checkpoint_format") == "gptq_v2")
            if self.method == "awq":
                return _awq(get)
            return _blocks(get, self.settings) if self.method == "fp8" else _nf4(get, has)
        except (RuntimeError, ArithmeticError, LookupError, ValueError, TypeError) as error:
            raise CorruptFileError(
                f"{prefix}: its tensors do not fit together: {error}", fix="fetch the checkpoint again"
            ) from error


def unpack_words(packed: Tensor, bits: int, count: int, dim: int) -> Tensor:
    """Return `count` unsigned numbers of 4 or 8 bits of int32 words along a dimension, lowest bits first, as uint8."""
    per = 32 // bits
    if packed.dtype != torch.int32 or not 0 <= packed.shape[dim] * per - count < per:
        raise ValueError(f"{tuple(packed.shape)} words of {packed.dtype} do not hold {count} numbers")
    numbers = packed.movedim(dim, -1).contiguous().view(torch.uint8)
    if bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)
    return numbers[..., :count].movedim(-1, dim)


def pack_words(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Return int32 words with unsigned numbers along a dimension: the inverse of `unpack_words`."""
    moved, missing = numbers.to(torch.uint8).movedim(dim, -1).contiguous(), -numbers.shape[dim] % (32 // bits)
    if missing:
        moved = torch.nn.functional.pad(moved, (0, missing))
    if bits == 4:
        pairs = moved.view(torch.int16)
        moved = (pairs | (pairs >> 4)).to(torch.uint8)  # the lower of both bytes
    return moved.view(torch.int32).movedim(-1, dim).contiguous()


def _packed(get: Get, has: Callable[[str], bool]) -> Codes | Tensor:
    packed, scales, shape = get("weight_packed"), get("weight_scale"), get("weight_shape").tolist()
    rows, columns = (int(size) for size in shape)
    scales = scales if scales.dim() == 2 else scales.view(-1, 1)
    if packed.dim() != 2 or packed.shape[0] != rows or scales.shape[0] != rows or columns % scales.shape[1]:
        raise ValueError(f"packed {tuple(packed.shape)}, scales {tuple(scales.shape)}, shape {shape}")
    bits = 4 if 0 <= packed.shape[1] * 8 - columns < 8 else 8
    numbers = unpack_words(packed, bits, columns, 1)
    if has("weight_g_idx"):
        raise InterchangeError("groups in the order of activations are not supported", fix="use actorder static")
    if bits == 8:
        if has("weight_zero_point"):
            raise InterchangeError("asymmetric int8 weights are not supported", fix="use symmetric ones")
        signed = numbers.float() - 128.0
        return Codes(WeightGrid("int8", scales), signed) if scales.shape[1] == 1 else _times(signed, scales)
    zeros = unpack_words(get("weight_zero_point"), 4, rows, 0) if has("weight_zero_point") else None
    return _int4(numbers, scales, zeros)


def _int4(numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Codes | Tensor:
    """Return int4 codes with [rows, groups] scales and zeros, dense where our kernels do not take the group."""
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zero points {tuple(zeros.shape)}, scales {tuple(scales.shape)}")
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    if numbers.shape[1] // scales.shape[1] in GROUPS:
        return Codes(WeightGrid("int4", scales.contiguous(), zeros), numbers.float())
    centre = 8.0 if zeros is None else zeros.float().repeat_interleave(numbers.shape[1] // scales.shape[1], dim=1)
    return _times(numbers.float() - centre, scales)


def _times(values: Tensor, scales: Tensor) -> Tensor:
    grouped = torch.unflatten(values, 1, (scales.shape[1], -1))
    return (grouped * scales.float()[..., None]).flatten(1).to(scales.dtype)


def _scaled(get: Get, has: Callable[[str], bool]) -> Codes | Tensor:
    weight, scales = get("weight"), get("weight_scale")
    if has("weight_zero_point") and bool(get("weight_zero_point").any()):
        raise InterchangeError("asymmetric 8-bit weights are not supported", fix="use symmetric ones")
    kinds = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
    if weight.dtype not in kinds:
        raise ValueError(f"weight of {weight.dtype}")
    rows, columns = weight.shape
    if scales.numel() == 1:
        scales = scales.view(1, 1).expand(rows, 1).contiguous()
    if scales.numel() == rows:
        return Codes(WeightGrid(kinds[weight.dtype], scales.view(rows, 1)), weight.float())  # type: ignore[arg-type]
    if scales.shape[0] == rows and columns % scales.shape[1] == 0:
        if weight.dtype == torch.int8:
            return _times(weight.float(), scales)
        return Codes(WeightGrid("fp8", scales), weight.float())
    return _blockwise(weight, scales, (128, 128))


def _blocks(get: Get, settings: Mapping[str, Any]) -> Tensor:
    size = settings.get("weight_block_size") or (128, 128)
    return _blockwise(get("weight"), get("weight_scale_inv"), (int(size[0]), int(size[1])))


def _blockwise(weight: Tensor, scales: Tensor, size: tuple[int, int]) -> Tensor:
    rows, columns = weight.shape
    if min(size) < 1 or tuple(scales.shape) != (-(-rows // size[0]), -(-columns // size[1])):
        raise ValueError(f"weight {tuple(weight.shape)}, scales {tuple(scales.shape)}, blocks {size}")
    wide = scales.float().repeat_interleave(size[0], 0)[:rows].repeat_interleave(size[1], 1)[:, :columns]
    return (weight.float() * wide).to(torch.bfloat16)


def _gptq(get: Get, has: Callable[[str], bool], *, version_two: bool) -> Codes | Tensor:
    packed, scales = get("qweight"), get("scales")
    columns, rows = packed.shape[0] * 8, packed.shape[1]
    if scales.dim() != 2 or scales.shape[1] != rows or columns % scales.shape[0]:
        raise ValueError(f"qweight {tuple(packed.shape)}, scales {tuple(scales.shape)}")
    numbers = unpack_words(packed, 4, columns, 0)
    zeros = unpack_words(get("qzeros"), 4, rows, 1)
    # The first version of the format stores zero points minus one, in four bits.
    zeros = zeros if version_two else (zeros + 1) & 15
    plain = torch.arange(columns) // (columns // scales.shape[0])
    index = get("g_idx").long() if has("g_idx") else plain
    if torch.equal(index, plain):
        return _int4(numbers.t().contiguous(), scales.t().contiguous(), zeros.t().contiguous())
    if len(index) != columns or not 0 <= int(index.min()) <= int(index.max()) < len(scales):
        raise ValueError(f"g_idx does not index {len(scales)} groups")
    return ((numbers.float() - zeros.float()[index]) * scales.float()[index]).t().to(scales.dtype).contiguous()


def _awq(get: Get) -> Codes | Tensor:
    packed, scales = get("qweight"), get("scales")
    columns, rows = packed.shape[0], packed.shape[1] * 8
    if scales.dim() != 2 or scales.shape[1] != rows or columns % scales.shape[0]:
        raise ValueError(f"qweight {tuple(packed.shape)}, scales {tuple(scales.shape)}")
    place = torch.tensor([_AWQ_ORDER.index(number) for number in range(8)])

    def unpack(words: Tensor) -> Tensor:
        numbers = unpack_words(words, 4, rows, 1)
        return torch.unflatten(numbers, 1, (-1, 8))[..., place].flatten(1)

    return _int4(unpack(packed).t().contiguous(), scales.t().contiguous(), unpack(get("qzeros")).t().contiguous())


def _nf4(get: Get, has: Callable[[str], bool]) -> Tensor:
    state = json.loads(bytes(get("weight.quant_state.bitsandbytes__nf4").tolist()))
    rows, columns = (int(size) for size in state["shape"])
    packed, size = get("weight").flatten(), int(state["blocksize"])
    if packed.dtype != torch.uint8 or packed.numel() * 2 != rows * columns or size < 1:
        raise ValueError(f"{packed.numel()} bytes for a weight of {rows} x {columns}")
    absmax = get("weight.absmax")
    if has("weight.nested_absmax"):
        nested, values = get("weight.nested_absmax").float(), get("weight.nested_quant_map").float()
        outer = nested.repeat_interleave(int(state["nested_blocksize"]))[: absmax.numel()]
        absmax = values[absmax.long()] * outer + float(state["nested_offset"])
    # The high bits of a byte come first.
    numbers = torch.stack((packed >> 4, packed & 15), dim=-1).flatten().long()
    scales = absmax.float().repeat_interleave(size)[: rows * columns]
    if scales.numel() != rows * columns:
        raise ValueError(f"{absmax.numel()} scales of blocks of {size} for a weight of {rows} x {columns}")
    dense = (get("weight.quant_map").float()[numbers] * scales).view(rows, columns)
    return dense.to({"float16": torch.float16, "bfloat16": torch.bfloat16}.get(str(state["dtype"]), torch.float32))
