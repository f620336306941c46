"""Sliding windows of a `config.json`: in all blocks, from one block on, by a repeated pattern, or listed by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piledriver.models.config import ModelConfig
from piledriver.models.interchange.families import Family


def read_window(kind: Family, theirs: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return our window fields."""
    window, key = theirs.get(kind.window_key), kind.window
    if key in ("by_layer", "flag") and not theirs.get("use_sliding_window"):
        window = None
    full = [] if window is None else _full_layers(kind, theirs, layers)
    if key == "none" or window is None or len(full) == layers:
        # No block uses the window: it is not a part of the model.
        full = list(range(layers))
        ours: dict[str, Any] = {}
    else:
        ours = {"sliding_window": window, "full_attention_layers": full}
        if kind.window_key == "attention_chunk_size":
            ours["chunked_attention"] = True
    if kind.no_rope == "full_attention" and (ours or kind.window_key not in theirs or theirs[kind.window_key]):
        ours["no_rope_layers"] = full
    return ours


def _full_layers(kind: Family, theirs: Mapping[str, Any], layers: int) -> list[int]:
    types = theirs.get("layer_types")
    if kind.window == "attention_types":
        types = [name for names, times in theirs["attention_types"] for _ in range(times) for name in names]
    if types is not None and kind.window not in ("all", "flag"):
        return [layer for layer, name in enumerate(types) if name in ("full_attention", "global")]
    if kind.window == "by_layer":
        return list(range(min(int(theirs["max_window_layers"]), layers)))
    if kind.window == "pattern":
        every = theirs.get("sliding_window_pattern") or theirs.get("_sliding_window_pattern") or kind.window_pattern
        if isinstance(every, str):  # EXAONE 4: a letter for each block, repeated; G for full attention
            return [layer for layer in range(layers) if every[layer % len(every)] == "G"]
        return [layer for layer in range(layers) if (layer + 1) % every == 0]
    if kind.window == "no_rope":
        flags = theirs.get("no_rope_layers") or [
            (layer + 1) % (theirs.get("no_rope_layer_interval") or 4) for layer in range(layers)
        ]
        slides_where_it_rotates = kind.window_key == "attention_chunk_size"
        return [layer for layer, rotates in enumerate(flags) if bool(rotates) != slides_where_it_rotates]
    return []


def write_window(kind: Family, config: ModelConfig) -> dict[str, Any]:
    """Return their window keys."""
    if kind.window == "none":
        return {}
    windowed = [config.window_of(layer) is not None for layer in range(config.layers)]
    sliding = "chunked_attention" if kind.window_key == "attention_chunk_size" else "sliding_attention"
    types = [sliding if slides else "full_attention" for slides in windowed]
    said: dict[str, Any] = {kind.window_key: config.sliding_window}
    if kind.window == "all":
        return said
    if kind.window == "flag":
        return {"use_sliding_window": any(windowed)} | said
    if kind.window == "attention_types":
        return said | {"attention_types": [[["local" if slides else "global"], 1] for slides in windowed]}
    said["layer_types"] = types
    if kind.window == "by_layer":
        first = windowed.index(True) if any(windowed) else config.layers
        said |= {"use_sliding_window": any(windowed), "max_window_layers": first}
    if kind.window == "no_rope" and kind.window_key == "sliding_window":
        said["use_sliding_window"] = any(windowed)
    return said
