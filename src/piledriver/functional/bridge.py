"""Both ways between functional modules and `torch.nn`, without copying a parameter.

`from_torch(module)` uses any `nn.Module` as a pure function of a tree; `to_torch(module, variables)` makes a real
`nn.Module`, one node for every functional module, so that hooks, FSDP by block, checkpoints and `torch.compile`
see what they see in any other model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.functional.errors import (
    ImmutableCollectionError,
    MissingCollectionError,
    MissingKeyError,
    MissingVariableError,
    ParameterShapeError,
    TransformError,
)
from piledriver.functional.frame import Context, Frame, Store
from piledriver.functional.module import Module, bound_at
from piledriver.functional.random.keys import Key
from piledriver.functional.tree import Tree, flatten, unflatten

BUFFERS = "buffers"


def from_torch(module: nn.Module) -> FromTorch:
    """Return an `nn.Module` as a functional module: parameters become `params`, buffers the collection `buffers`.

    >>> layer = from_torch(nn.Linear(2, 3))
    >>> variables = layer.variables()
    >>> layer.apply(variables, torch.zeros(1, 2)).shape
    torch.Size([1, 3])
    """
    if not isinstance(module, nn.Module):
        raise TransformError(f"from_torch of a {type(module).__name__}", fix="pass a torch.nn.Module")
    return FromTorch(module)


class FromTorch(Module):
    """What `from_torch` returns. `init` returns the module's own tensors, without a copy, and uses no key."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with the tree's tensors in place of its own."""
        frame = self._bound_frame("a torch module")
        own, held = dict(self.module.named_parameters()), dict(self.module.named_buffers())  # tied ones once
        if self.is_initialising:
            self._declare(frame, own, held)
            empty = {name: torch.empty_like(value) for name, value in {**own, **held}.items()}
            return torch.func.functional_call(self.module, empty, args, kwargs)
        given = _leaves_by_name(frame, "params") if own else {}
        buffers = _leaves_by_name(frame, BUFFERS) if held else {}
        if own and not given:
            raise MissingCollectionError("params", frame.path, frame.context.stores)
        if held and not buffers:
            raise MissingCollectionError(BUFFERS, frame.path, frame.context.stores)
        # What is missing would silently be the module's own.
        for collection, wanted, found in (("params", own, given), (BUFFERS, held, buffers)):
            for name, value in wanted.items():
                if name not in found:
                    raise MissingVariableError(collection, name, frame.path, found)
                if found[name].shape != value.shape:
                    raise ParameterShapeError(name, frame.path, found[name].shape, value.shape)
        is_mutable = frame.context.is_mutable(BUFFERS)
        # The call may write to buffers in place (batch norm does): it writes to copies, and they are what comes back.
        fresh = {name: value.clone() for name, value in buffers.items()}
        output = torch.func.functional_call(self.module, {**given, **fresh}, args, kwargs)
        if is_mutable:
            for name, value in fresh.items():
                frame.context.written[BUFFERS, (*frame.path, *name.split("."))] = value
        return output

    def variables(self) -> Tree:
        """Return the module's own tensors as variables, detached and shared."""
        params = {("params", *name.split(".")): value.detach() for name, value in self.module.named_parameters()}
        buffers = {(BUFFERS, *name.split(".")): value for name, value in self.module.named_buffers()}
        return unflatten({**params, **buffers})

    def _declare(self, frame: Frame, own: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        for collection, values in (("params", own), (BUFFERS, held)):
            for name, value in values.items():
                *above, last = name.split(".")
                at = frame
                for step in above:
                    at = Frame(frame.context, at, step)
                at.declare(collection, last, tuple(value.shape), value.dtype, None, functools.partial(_given, value))


def to_torch(
    module: Module, variables: Mapping[str, Any], *, streams: tuple[str, ...] = (), mutable: tuple[str, ...] = ()
) -> ToTorch:
    """Return a module and its variables as an `nn.Module` whose parameters are the tree's own tensors.

    State dict keys are the dotted paths. In training mode each of `streams` gets a fresh key, drawn from torch's
    generator, and the collections in `mutable` (`batch_stats`) are written back to the buffers.
    """
    if not isinstance(module, Module):
        raise TransformError(f"to_torch of a {type(module).__name__}", fix="pass a functional module")
    for name in mutable:
        if name not in variables:
            raise TransformError(
                f"the variables have no collection {name!r} to write back to",
                fix="leave it out of `mutable`: a torch module keeps what it was made with",
            )
    return ToTorch(module, variables, streams, mutable)


class _Node(nn.Module):
    """The parameters of one functional module, and the place where its call happens."""

    def __init__(self, params: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._collections: dict[str, dict[str, str]] = {}
        for name in (*params, *(name for values in others.values() for name in values)):
            if hasattr(type(self), name) or hasattr(self, name):
                raise TransformError(f"{name!r} is a name of every torch module", fix="rename that child or parameter")
        for name, value in params.items():
            if isinstance(value, Tensor):
                is_own = isinstance(value, nn.Parameter)
                setattr(self, name, value if is_own else nn.Parameter(value, value.is_floating_point()))
        for collection, values in others.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    attribute = name if name not in self._parameters else f"{collection}_{name}"
                    self.register_buffer(attribute, value)
                    self._collections.setdefault(collection, {})[name] = attribute
        below = {name: None for one in (params, *others.values()) for name, v in one.items() if isinstance(v, Mapping)}
        for name in below:
            deeper = {c: v[name] for c, v in others.items() if isinstance(v.get(name), Mapping)}
            node = params.get(name, {})
            self.add_module(name, _Node(node if isinstance(node, Mapping) else {}, deeper))

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the functional module's call; the arguments pass through here, so that hooks see and may cast them."""
        return call(*args, **kwargs)


class _NodeStore:
    """A node's values of one collection, read when they are asked for: FSDP may have swapped them since."""

    def __init__(self, node: nn.Module, collection: str) -> None:
        self.node = node
        self.collection = collection

    def get(self, name: str, default: Any = None) -> Any:
        value: Tensor | None
        if self.collection == "params":
            value = self.node._parameters.get(name)
        else:
            attribute = self.node._collections.get(self.collection, {}).get(name)  # type: ignore[union-attr, operator]
            value = None if attribute is None else self.node._buffers[attribute]
        if value is not None:
            return value
        child = self.node._modules.get(name)
        return default if child is None else _NodeStore(child, self.collection)

    def tree(self) -> Tree:
        found: dict[str, Any]
        if self.collection == "params":
            found = {name: value for name, value in self.node._parameters.items() if value is not None}
        else:
            names = self.node._collections.get(self.collection, {})  # type: ignore[union-attr, operator]
            found = {name: self.node._buffers[attribute] for name, attribute in names.items()}
        for name, child in self.node._modules.items():
            below = _NodeStore(child, self.collection).tree() if isinstance(child, nn.Module) else Tree()
            if len(below):
                found[name] = below
        return Tree(found)

    def keys(self) -> list[str]:
        return [*self.node._parameters, *self.node._modules]


class ToTorch(_Node):
    """What `to_torch` returns."""

    def __init__(
        self, module: Module, variables: Mapping[str, Any], streams: tuple[str, ...], mutable: tuple[str, ...]
    ) -> None:
        if "params" not in variables:
            raise TransformError("the variables have no collection 'params'", fix="pass what `init` returned")
        others = {name: tree for name, tree in variables.items() if name != "params"}
        super().__init__(variables["params"], others)
        self._functional = module
        self._streams = streams
        self._mutable = mutable
        self._names = tuple(variables)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the functional module, each child through its node."""
        rngs = {name: Key(torch.randint(1 << 62, (), dtype=torch.int64)) for name in self._streams if self.training}
        stores: dict[str, Store] = {name: _NodeStore(self, name) for name in self._names}
        mutable = frozenset(self._mutable) if self.training else frozenset()
        context = Context(stores, rngs, mutable, hook=self._through_nodes)
        try:
            output = bound_at(self._functional, Frame(context, None, ""))(*args, **kwargs)
        except (ImmutableCollectionError, MissingKeyError) as error:
            error.add_note(
                "this is a torch module: `to_torch(module, variables, mutable=..., streams=...)` and `train()`"
            )
            raise
        for (collection, path), value in context.written.items():
            self._write_back(collection, path, value)
        return output

    @property
    def functional(self) -> Module:
        return self._functional

    def variables(self) -> Tree:
        """Return the current values as functional variables, detached and shared."""
        trees = {name: _NodeStore(self, name).tree() for name in self._names}
        return unflatten(
            {(name, *path): leaf.detach() for name, tree in trees.items() for path, leaf in flatten(tree).items()}
        )

    def _through_nodes(
        self, module: Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        node: nn.Module | None = self
        for step in module.path:
            node = None if node is None else node._modules.get(step)
        if node is None or node is self:
            return method(module, *args, **kwargs)
        return node(functools.partial(method, module), *args, **kwargs)

    def _write_back(self, collection: str, path: tuple[str, ...], value: Tensor) -> None:
        node: nn.Module = self
        for step in path[:-1]:
            node = node._modules[step]  # type: ignore[assignment]
        names: Any = node._collections
        buffer = node._buffers[names[collection][path[-1]]]
        with torch.no_grad():
            if buffer is not None:
                buffer.copy_(value)


def _leaves_by_name(frame: Frame, collection: str) -> dict[str, Tensor]:
    return {".".join(path): leaf for path, leaf in flatten(frame.subtree(collection) or {}).items()}


def _given(value: Tensor, key: Key, device: torch.device) -> Tensor:
    return value.detach().to(device)
