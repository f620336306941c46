"""Functions on the tensors of nested structures: lists, tuples, named tuples, mappings. Other leaves and types stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Path = tuple[str | int, ...]


def is_tensor(thing: object) -> bool:
    """Return whether this is a tensor."""
    return isinstance(thing, torch.Tensor)


def is_named_tuple(thing: object) -> bool:
    """Return whether this is an instance of a named tuple, which is rebuilt by position."""
    return isinstance(thing, tuple) and hasattr(thing, "_asdict") and hasattr(thing, "_fields")


def rebuild_sequence(original: Any, items: Iterator[Any]) -> Any:
    """Return a sequence of the type of `original` with new items."""
    return type(original)(*items) if is_named_tuple(original) else type(original)(items)


def map_tensors(
    function: Callable[..., Any],
    data: Any,
    *args: Any,
    test: Callable[[Any], bool] = is_tensor,
    strict: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `function` on every leaf that passes `test`; others stay, or raise TypeError if `strict`.

    >>> map_tensors(lambda t: t + 1, {"a": [torch.tensor(1)], "b": "text"})
    {'a': [tensor(2)], 'b': 'text'}
    """
    if isinstance(data, (tuple, list)):
        return rebuild_sequence(
            data, (map_tensors(function, o, *args, test=test, strict=strict, **kwargs) for o in data)
        )
    if isinstance(data, Mapping):
        mapped = {k: map_tensors(function, v, *args, test=test, strict=strict, **kwargs) for k, v in data.items()}
        return rebuild_mapping(data, mapped)
    if test(data):
        return function(data, *args, **kwargs)
    if strict:
        raise TypeError(
            f"Unsupported types ({type(data)}) passed to `{function.__name__}`. Only nested list/tuple/dicts of "
            f"objects that are valid for `{test.__name__}` should be passed."
        )
    return data


def rebuild_mapping(original: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `original`, or a plain dict if that type cannot be built from one."""
    if type(original) is dict:
        return mapped
    try:
        return type(original)(mapped)  # type: ignore[call-arg]
    except TypeError:
        return mapped


def leaves(data: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf with its path, in a fixed order.

    >>> [(path, int(leaf)) for path, leaf in leaves({"a": [1, 2]})]
    [(('a', 0), 1), (('a', 1), 2)]
    """
    if isinstance(data, (tuple, list)):
        for i, item in enumerate(data):
            yield from leaves(item, (*path, i))
    elif isinstance(data, Mapping):
        for key, item in data.items():
            yield from leaves(item, (*path, key))
    else:
        yield path, data


def tensors(data: Any) -> Iterator[torch.Tensor]:
    """Return an iterator over every tensor."""
    return (leaf for _, leaf in leaves(data) if isinstance(leaf, torch.Tensor))


def send_to_device(
    data: Any, device: Any, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> Any:
    """Move every tensor (and everything else that has `.to`, such as a batch encoding) to a device.

    >>> send_to_device({"x": torch.ones(1), "id": "a"}, "meta", skip_keys="id")["x"].device.type
    'meta'
    """
    if isinstance(data, torch.Tensor) or hasattr(data, "to"):
        try:
            return data.to(device, non_blocking=non_blocking)
        except TypeError:
            # Third-party batches without `non_blocking`.
            return data.to(device)
    if isinstance(data, (tuple, list)):
        return rebuild_sequence(data, (send_to_device(item, device, non_blocking, skip_keys) for item in data))
    if isinstance(data, Mapping):
        skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or ()
        return rebuild_mapping(
            data,
            {
                key: value if key in skipped else send_to_device(value, device, non_blocking, skip_keys)
                for key, value in data.items()
            },
        )
    return data


def find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor's first dimension; None if no tensor has one."""
    return next((t.shape[0] for t in tensors(data) if t.ndim > 0), None)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor; None without tensors."""
    return next((t.device for t in tensors(data)), None)


def listify(data: Any) -> Any:
    """Convert every tensor to a list of numbers."""
    return map_tensors(lambda t: (t.detach().float() if t.dtype is torch.bfloat16 else t.detach()).cpu().tolist(), data)


def slice_tensors(data: Any, part: slice) -> Any:
    """Slice every tensor."""
    return map_tensors(lambda t: t[part], data)


def concatenate(pieces: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate the tensors of structures of the same form along a dimension.

    >>> concatenate([{"a": torch.ones(1)}, {"a": torch.zeros(2)}])["a"].tolist()
    [1.0, 0.0, 0.0]
    """
    first = pieces[0]
    if isinstance(first, (tuple, list)):
        return rebuild_sequence(first, (concatenate([piece[i] for piece in pieces], dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: concatenate([piece[key] for piece in pieces], dim) for key in first})
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"can only concatenate tensors but got {type(first)}")
    return torch.cat(list(pieces), dim=dim)


def to_float32(data: Any) -> Any:
    """Convert 16-bit tensors to float32, so that losses and metrics outside the model are computed exactly."""
    return map_tensors(
        lambda t: t.float(),
        data,
        test=lambda t: isinstance(t, torch.Tensor) and t.dtype in (torch.float16, torch.bfloat16),
    )
