"""Frames: the path of a module during one call, with its variables, names and random streams.

A `Context` lives for one `init` or `apply`; a `Frame` is one module's place in it. Both are private to the call, which
makes `apply` pure: what a module writes goes to the context and is returned as a new tree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from piledriver.functional.errors import (
    ImmutableCollectionError,
    InitialiserError,
    InvalidNameError,
    MissingCollectionError,
    MissingKeyError,
    MissingVariableError,
    NameInUseError,
    ParameterShapeError,
    VariablesError,
    dotted,
)
from piledriver.functional.random.keys import Key, fold_in
from piledriver.functional.torch_private import is_fake
from piledriver.functional.tree import Path, Tree, unflatten

Axes = tuple[str | None, ...]
Place = tuple[str, Path]


class Initialiser(Protocol):
    """Makes a parameter from a key and a shape alone."""

    def __call__(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor: ...


class Store(Protocol):
    """Where a frame finds its values by name: the dict inside a `Tree`, or an `nn.Module`."""

    def get(self, name: str, default: Any = None, /) -> Any:
        """Return the value or the store below, or None."""
        ...


@dataclass(frozen=True)
class Declaration:
    """A variable that a module declared while its shapes were inferred: everything needed to make it."""

    collection: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes | None
    make: Callable[[Key, torch.device], Tensor]


class Context:
    """What one `init` or `apply` shares among its modules."""

    __slots__ = ("declared", "device", "draws", "hook", "mutable", "rngs", "sharding", "stores", "written")

    def __init__(
        self,
        stores: Mapping[str, Store],
        rngs: Mapping[str, Key],
        mutable: frozenset[str] | None = frozenset(),
        *,
        declared: dict[Place, Declaration] | None = None,
        device: torch.device | None = None,
        hook: Any = None,
        sharding: Any = None,
    ) -> None:
        self.stores = stores
        self.rngs = rngs
        self.mutable = mutable  # None: every collection
        self.written: dict[Place, Any] = {}
        self.draws: dict[tuple[str, str], int] = {}
        self.declared = declared  # not None: shapes are being inferred
        self.device = device
        self.hook = hook
        self.sharding = sharding

    def numbered(self, stream: str, path: str) -> str:
        """Return `path:number`, where the number counts the draws of this stream at this path from 0.

        Counted here and not in a frame: a shared block has new frames in each application, and must draw anew.
        """
        number = self.draws.get((stream, path), 0)
        self.draws[stream, path] = number + 1
        return f"{path}:{number}"

    def is_mutable(self, collection: str) -> bool:
        """Return whether the caller takes new values of this collection back."""
        return self.mutable is None or collection in self.mutable

    def updated(self, variables: Mapping[str, Any]) -> Tree:
        """Return the mutable collections with what was written."""
        collections = {name: tree for name, tree in variables.items() if self.is_mutable(name)}
        fresh = {(collection, *path): value for (collection, path), value in self.written.items()}
        return Tree(collections).merge(unflatten(fresh))


class Frame:
    """One module's place in a context."""

    __slots__ = ("context", "depth", "name", "names", "params", "parent", "prefix")

    def __init__(self, context: Context, parent: Frame | None, name: str, prefix: Path = ()) -> None:
        self.context = context
        self.parent = parent
        self.name = name
        self.prefix = prefix  # of a root inside a lifted transform: where that transform stands
        self.names: set[str] = set()
        self.depth = 0
        self.params: Store | None
        if parent is None:
            self.params = context.stores.get("params")
        else:
            above = parent.params
            self.params = None if above is None else below(above, name)

    @property
    def path(self) -> Path:
        """The path from the root; built only when a message, a write or a key needs it."""
        return self.prefix if self.parent is None else (*self.parent.path, self.name)

    def claim(self, kind: str, name: str) -> None:
        """Take a name for this call."""
        if name in self.names:
            raise NameInUseError(kind, name, self.path)
        if not isinstance(name, str) or not name or "." in name:
            raise InvalidNameError(name, self.path)
        self.names.add(name)

    def param(
        self, name: str, init: Initialiser, shape: tuple[int, ...], dtype: torch.dtype, axes: Axes | None
    ) -> Tensor:
        """Return the stored parameter, or declare it while shapes are inferred."""
        names = self.names
        if name in names:
            raise NameInUseError("parameter", name, self.path)
        names.add(name)
        store = self.params
        value = None if store is None else store.get(name)
        if value is None:
            return self._absent_param(name, init, shape, dtype, axes)
        if value.shape != shape and tuple(value.shape) != _sizes(shape):
            raise ParameterShapeError(name, self.path, value.shape, _sizes(shape))
        return value  # type: ignore[no-any-return]

    def _absent_param(
        self, name: str, init: Initialiser, shape: tuple[int, ...], dtype: torch.dtype, axes: Axes | None
    ) -> Tensor:
        if self.context.declared is None:
            if not self.context.stores.get("params"):
                raise MissingCollectionError("params", self.path, self.context.stores)
            store: Mapping[str, Any] = self.params if isinstance(self.params, Mapping) else {}
            raise MissingVariableError("params", name, self.path, store)

        sizes, path = _sizes(shape), self.path

        def make(key: Key, device: torch.device) -> Tensor:
            try:
                inspect.signature(init).bind(key, sizes, dtype, device)
            except TypeError as error:
                what = f"cannot be called with (key, shape, dtype, device): {error}"
                raise InitialiserError(name, path, what) from None
            except ValueError:  # a builtin without a signature
                pass
            return init(key, sizes, dtype, device)

        return self.declare("params", name, sizes, dtype, axes, make)

    def declare(
        self,
        collection: str,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        axes: Axes | None,
        make: Callable[[Key, torch.device], Tensor],
    ) -> Tensor:
        """Record a variable during shape inference and return a stand-in for it."""
        if not isinstance(name, str) or not name or "." in name:
            raise InvalidNameError(name, self.path)
        assert self.context.declared is not None
        path = (*self.path, name)
        earlier = self.context.declared.get((collection, path))
        if earlier is not None and earlier.shape != shape:
            raise ParameterShapeError(name, self.path, earlier.shape, shape)
        if earlier is None:
            self.context.declared[collection, path] = Declaration(collection, path, shape, dtype, axes, make)
        return torch.empty(shape, dtype=dtype, device=self.context.device)

    def read(self, collection: str, name: str) -> Any:
        """Return the current value of a variable, including what this call wrote, or None."""
        written = self.context.written
        if written:
            value = written.get((collection, (*self.path, name)))
            if value is not None:
                return value
        store = self.store(collection)
        return None if store is None else store.get(name)

    def write(self, collection: str, name: str, value: Any) -> None:
        """Set a variable for the rest of this call and for what the caller gets back."""
        if self.context.declared is None and not self.context.is_mutable(collection):
            raise ImmutableCollectionError(collection, name, self.path, self.context.mutable or ())
        self.context.written[collection, (*self.path, name)] = value

    def store(self, collection: str) -> Store | None:
        """Return the values of one collection at this frame."""
        if collection == "params":
            return self.params
        if self.parent is None:
            return self.context.stores.get(collection)
        above = self.parent.store(collection)
        return None if above is None else below(above, self.name)

    def subtree(self, collection: str) -> Tree | None:
        """Return all values of one collection at and below this frame, including what this call wrote."""
        store, path = self.store(collection), self.path
        fresh = {
            at[len(path) :]: value
            for (written, at), value in self.context.written.items()
            if written == collection and at[: len(path)] == path
        }
        if store is None:
            return unflatten(fresh) if fresh else None
        tree = Tree(store) if isinstance(store, dict) else store.tree()  # type: ignore[attr-defined]
        return tree.merge(unflatten(fresh)) if fresh else tree

    def variables(self) -> dict[str, Tree]:
        """Return every collection at and below this frame."""
        names = {*self.context.stores, *(collection for collection, _ in self.context.written)}
        found = {name: self.subtree(name) for name in sorted(names)}
        return {name: tree for name, tree in found.items() if tree is not None}

    def make_key(self, stream: str) -> Key:
        """Return a fresh key: the stream's, folded with this path and the number of earlier draws at it."""
        root = self.context.rngs.get(stream)
        if root is None:
            if self.context.declared is not None:
                return Key(torch.zeros((), dtype=torch.int64))
            raise MissingKeyError(stream, self.path, self.context.rngs)
        if not isinstance(root, Key):
            raise VariablesError(
                f"{dotted(self.path)}: the key of the stream {stream!r} is of type {type(root).__name__}",
                fix=f"make one, `rngs={{'{stream}': key(0)}}`",
            )
        return fold_in(root, self.context.numbered(stream, ".".join(self.path)))

    def streams(self) -> dict[str, Key]:
        """Return the keys for one application of a lifted module at this path; a shared one draws anew each time."""
        place = self.context.numbered("(application)", ".".join(self.path))
        if place.endswith(":0"):
            return dict(self.context.rngs)
        return {stream: fold_in(key, place) for stream, key in self.context.rngs.items()}


def _sizes(shape: Any) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def below(store: Store, name: str) -> Store | None:
    """Return the store one level down."""
    value = store.get(name)
    if type(value) is Tree:
        return value._data
    return value if hasattr(value, "tree") else None


def made(declaration: Declaration, root: Key, device: torch.device) -> Tensor:
    """Return the initial value of a declared variable: a function of the root key and its own path."""
    path, name = declaration.path[:-1], declaration.path[-1]
    value = declaration.make(fold_in(root, ".".join((declaration.collection, *declaration.path))), device)
    if not isinstance(value, Tensor):
        raise InitialiserError(name, path, f"returned a {type(value).__name__}")
    if tuple(value.shape) != declaration.shape:
        raise InitialiserError(name, path, f"returned the shape {tuple(value.shape)}, not {declaration.shape}")
    return value.to(device=device, dtype=declaration.dtype)


def with_numbers(value: Tensor, name: str, frame: Frame) -> Tensor:
    """Return an initial value; raise an error if it was made from a stand-in of the input."""
    if is_fake(value):
        raise InitialiserError(name, frame.path, "depends on the input, which has no numbers while shapes are inferred")
    return value
