"""Frozen dataclasses that are trees: their fields are children, except those marked `static`."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn, TypeVar, dataclass_transform

import torch.utils._pytree as pytree

from piledriver.functional.errors import FunctionalError

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """Mark a field as part of the structure, not of the values: a function, an optimizer, a setting."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, dataclasses.field))
def tree_dataclass(cls: type[T]) -> type[T]:
    """Make a frozen, keyword-only dataclass and register it as a torch pytree; subclasses are registered too.

    >>> import torch
    >>> @tree_dataclass
    ... class Pair:
    ...     a: torch.Tensor
    ...     name: str = static(default="pair")
    >>> pytree.tree_map(lambda x: x + 1, Pair(a=torch.tensor(1))).a
    tensor(2)
    """
    if "tree_fields" in vars(cls):
        return cls  # a subclass that was decorated too
    made = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    # In place of the generated ones, whose error names no alternative.
    made.__setattr__ = made.__delattr__ = _refuse_assignment  # type: ignore[method-assign]
    made.__init_subclass__ = classmethod(_decorated)  # type: ignore[method-assign, assignment]
    fields = dataclasses.fields(made)  # type: ignore[arg-type]
    children = tuple(field.name for field in fields if not field.metadata.get("static"))
    settings = tuple(field.name for field in fields if field.metadata.get("static"))

    made.tree_fields = children  # type: ignore[attr-defined]  # for walks that compilers trace (`leaves_of`)

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, name) for name in children], tuple(getattr(value, name) for name in settings)

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        values, context = flatten(value)
        return [(pytree.GetAttrKey(name), one) for name, one in zip(children, values, strict=True)], context

    def unflatten(values: Any, context: Any) -> Any:
        return made(**dict(zip(children, values, strict=True)), **dict(zip(settings, context, strict=True)))

    pytree.register_pytree_node(
        made,
        flatten,
        unflatten,
        serialized_type_name=f"{made.__module__}.{made.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return made


def _decorated(cls: type[Any], /, **kwargs: Any) -> None:
    # Otherwise a new field would silently not be part of the tree.
    tree_dataclass(cls)


def _refuse_assignment(self: object, name: str, value: Any = None) -> NoReturn:
    raise FunctionalError(
        f"{type(self).__name__} is frozen: cannot assign its field {name!r}",
        fix=f"make another one: `replace(value, {name}=...)`",
    )


def replace(value: T, **changes: Any) -> T:
    """Return the value with some fields replaced."""
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]
