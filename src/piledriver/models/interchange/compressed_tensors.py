"""Write quantised layers as compressed-tensors, the format that vLLM and transformers open.

Layouts: `pack-quantized` (int4, weight-only int8), `int-quantized` (int8 with dynamic inputs, embeddings),
`float-quantized` (fp8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piledriver.kernels.linear import QuantisedWeight, WeightGrid, WeightKind, weight_codes
from piledriver.models.codes import QuantisedCodes
from piledriver.models.config import ModelConfig
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.quantised_layers import Codes, pack_words
from piledriver.models.interchange.tensors import OPERATIONS
from piledriver.models.quantised import DynamicQuantisedLinear, QuantisedLinear, StackedCodes


def write_layer(
    layer: QuantisedCodes, operation: str, names: list[str], config: ModelConfig, dtype: torch.dtype, *, device: str
) -> list[tuple[str, Tensor]]:
    """Return the tensors of a layer, which is stored under the dense names `names`; scales are in `dtype`.

    On the device `meta` they have shapes only, and nothing is computed.
    """
    made: list[tuple[str, Tensor]] = []

    def split(rows: Tensor) -> list[Tensor]:
        stacked = torch.unflatten(rows, 0, (layer.count, -1)) if isinstance(layer, StackedCodes) else rows
        return OPERATIONS[operation].write(stacked, config)

    # Small integers: codes in fp32 take eight times the memory of what is written.
    small = {"int4": torch.uint8, "int8": torch.int8}.get(layer.kind, torch.float32)
    weight = layer.quantised._replace(data=layer.weight.to(device), scales=layer.scales.to(device))
    codes, scales = split(weight_codes(weight, small)), split(weight.scales.to(dtype))
    zeros = [None] * len(codes) if layer.zeros is None else split(layer.zeros.to(device))
    if any(code.dim() != 2 or len(code) != len(scale) for code, scale in zip(codes, scales, strict=True)):
        raise InterchangeError(
            f"{names[0]}: a stacked or transposed weight cannot be written quantised", fix="save it dense"
        )
    for name, code, scale, zero in zip(names, codes, scales, zeros, strict=True):
        prefix = name.removesuffix(".weight")
        bits = 4 if layer.kind == "int4" else 8
        if _format(layer) == "pack-quantized":
            unsigned = code if bits == 4 else code.view(torch.uint8) ^ 128  # plus 128
            made.append((f"{prefix}.weight_packed", pack_words(unsigned, bits, 1)))
            made.append((f"{prefix}.weight_shape", torch.tensor(code.shape)))
        else:
            made.append((name, code.to(torch.int8 if layer.kind == "int8" else torch.float8_e4m3fn)))
        made.append((f"{prefix}.weight_scale", scale.contiguous()))
        if zero is not None:
            made.append((f"{prefix}.weight_zero_point", pack_words(zero, 4, 0)))
    return made


def can_hold(weight: Tensor, operation: str, config: ModelConfig) -> bool:
    """Return whether a dense weight, on any device, may be written quantised: not stacked, not transposed."""
    codes, scales = (
        OPERATIONS[operation].write(torch.empty(*weight.shape[:-1], columns, device="meta"), config)
        for columns in (weight.shape[-1], 1)
    )
    return all(code.dim() == 2 and len(code) == len(scale) for code, scale in zip(codes, scales, strict=True))


def merge_codes(parts: list[Codes], operation: str, config: ModelConfig) -> Codes | None:
    """Return the codes of one of our weights from those of theirs; None if their grids differ in kind or group."""
    grids = [part.grid for part in parts]
    if (
        len({(grid.kind, part.values.shape[1], grid.scales.shape[1]) for grid, part in zip(grids, parts, strict=True)})
        > 1
    ):
        return None
    read = OPERATIONS[operation].read
    zeros = None
    if any(grid.zeros is not None for grid in grids):
        filled = [torch.full_like(g.scales, 8, dtype=torch.uint8) if g.zeros is None else g.zeros for g in grids]
        zeros = read(filled, config).contiguous()
    scales = read([grid.scales for grid in grids], config).contiguous()
    values = read([part.values for part in parts], config)
    return Codes(WeightGrid(grids[0].kind, scales, zeros), values) if len(values) == len(scales) else None


def flat_codes(codes: Codes) -> QuantisedWeight:
    """Return stacked codes of [experts, rows, columns] as one weight, the rows of one expert after the other's."""
    grid = codes.grid
    zeros = None if grid.zeros is None else grid.zeros.flatten(0, 1)
    return WeightGrid(grid.kind, grid.scales.flatten(0, 1), zeros).pack(codes.values.flatten(0, 1))


def quantisation_settings(
    layers: Iterable[QuantisedLinear], vocabulary: Mapping[str, QuantisedCodes], dense: list[str]
) -> dict[str, Any]:
    """Return `quantization_config` of a model with these layers in its blocks.

    `vocabulary` has the quantised embedding and output projection by their names; `dense` names the linear layers left
    dense.
    """
    given = list(layers)
    groups = {layer.quantised.group for layer in given if layer.scales.shape[1] > 1}
    schemes = {_scheme(layer, groups) for layer in given}
    if len(schemes) > 1:
        raise InterchangeError(
            f"layers of {len(schemes)} schemes cannot be written to one folder", fix="quantise with one scheme"
        )
    # Names come first: compressed-tensors warns of a name that it reaches after a class.
    found = [(_scheme(layer, set()), [name]) for name, layer in sorted(vocabulary.items())]
    found += [(scheme, ["Linear"]) for scheme in schemes]
    config_groups = {f"group_{i}": _group(scheme, targets) for i, (scheme, targets) in enumerate(found)}
    formats = {group["format"] for group in config_groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "ignore": sorted(dense),
        "kv_cache_scheme": None,
        "config_groups": config_groups,
    }


class _Scheme(NamedTuple):
    """What the layers of a group share."""

    kind: WeightKind
    group: int
    """Columns that share a scale; 0 for whole rows."""
    symmetric: bool
    dynamic: bool
    format: str


def _scheme(layer: QuantisedCodes, groups: set[int]) -> _Scheme:
    """Return the scheme of a layer; a row of one group is grouped where those of others are."""
    group = layer.quantised.group if layer.kind == "int4" or layer.quantised.group in groups else 0
    dynamic = isinstance(layer, DynamicQuantisedLinear)
    return _Scheme(layer.kind, group, layer.zeros is None, dynamic, _format(layer))


def _group(scheme: _Scheme, targets: list[str]) -> dict[str, Any]:
    """Return the entry of `config_groups` of the layers that `targets` name."""
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme.kind == "int4" else 8,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": scheme.symmetric,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group or None,
        "dynamic": False,
        "observer": "minmax",
    }
    inputs = None
    if scheme.dynamic:
        inputs = {**weights, "strategy": "group" if scheme.group else "token", "dynamic": True, "observer": None}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": scheme.format,
    }


def _format(layer: QuantisedCodes) -> str:
    if layer.kind == "fp8":
        return "float-quantized"
    # transformers initialises embeddings by their `weight`, which packed ones do not have.
    packed = isinstance(layer, QuantisedLinear) and not isinstance(layer, DynamicQuantisedLinear)
    return "pack-quantized" if packed else "int-quantized"
