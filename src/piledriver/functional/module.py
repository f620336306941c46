"""Modules: frozen dataclasses that declare parameters and children where they use them.

    class MLP(Module):
        hidden: int

        def __call__(self, x):
            x = self.child("up", Dense(self.hidden))(x)
            return self.child("down", Dense(x.shape[-1]))(torch.relu(x))

There is one way to define a module. A module holds hyperparameters only; `init` returns its variables as an immutable
tree and `apply` is a pure function of that tree. Names are given, never counted, so adding a layer renames nothing and
changes no other layer's initial value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.torch_version import TorchVersion

from piledriver.core.errors import nearest
from piledriver.functional.call_args import (
    Mutable,
    Variables,
    checked_example,
    collections_of,
    device_of,
    root_key,
    stand_in,
    stores_of,
    streams_of,
)
from piledriver.functional.errors import (
    FrozenModuleError,
    MissingCollectionError,
    MissingVariableError,
    TransformError,
    UnboundModuleError,
    UnknownArgumentError,
    dotted,
)
from piledriver.functional.frame import Axes, Context, Declaration, Frame, Initialiser, Place, made, with_numbers
from piledriver.functional.initialisers import DrawRecipe, initialiser
from piledriver.functional.random.keys import Key
from piledriver.functional.torch_private import data_dependent_error, fake_tensor_mode
from piledriver.functional.tree import Tree, unflatten

M = TypeVar("M", bound="Module")
Method = str | Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known of a variable before it exists: its shape, its dtype and the logical names of its dimensions."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes | None = None


class Variable:
    """A variable of a collection inside a module: read and assign `value`."""

    __slots__ = ("_collection", "_frame", "_name")

    def __init__(self, frame: Frame, collection: str, name: str) -> None:
        self._frame = frame
        self._collection = collection
        self._name = name

    @property
    def value(self) -> Any:
        """The current value."""
        return self._frame.read(self._collection, self._name)

    @value.setter
    def value(self, value: Any) -> None:
        self._frame.write(self._collection, self._name, value)


@dataclass_transform(frozen_default=True)
class Module:
    """The base of functional modules. Every subclass becomes a frozen dataclass.

    >>> class Scale(Module):
    ...     def __call__(self, x):
    ...         return x * self.param("scale", lambda key, shape, dtype, device: torch.full(shape, 2.0), (x.shape[-1],))
    >>> from piledriver.functional import key
    >>> variables = Scale().init(key(0), torch.ones(1, 3))
    >>> Scale().apply(variables, torch.ones(1, 3))
    tensor([[2., 2., 2.]])
    """

    _frame: ClassVar[Frame | None] = None
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        fields = inspect.get_annotations(cls)
        for name in (*fields, *vars(cls)):
            if name in _OF_EVERY_MODULE:
                raise TransformError(
                    f"{cls.__name__} defines {name!r}, which every module has already", fix="choose another name"
                )
        if "setup" in vars(cls):
            raise TransformError(
                f"{cls.__name__} defines `setup`, which is never called",
                fix="declare children where they are used: `self.child('up', Dense(8))(x)` in `__call__`",
            )
        for name, member in list(vars(cls).items()):
            is_method = inspect.isfunction(member) and not name.startswith("_") and name not in fields
            if name == "__call__" or is_method:
                setattr(cls, name, _entered(member, name))
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        cls.__init__ = _explained(cls.__init__, cls)  # type: ignore[method-assign]
        # In place of the generated ones, whose error names no alternative.
        cls.__setattr__ = Module.__setattr__  # type: ignore[method-assign]
        cls._fields = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        cls.__delattr__ = Module.__setattr__  # type: ignore[method-assign, assignment]

    def __setattr__(self, name: str, value: Any = None) -> NoReturn:
        raise FrozenModuleError(type(self).__name__, name)

    # By `__dict__`, since the compiler of torch 2.11 hashes modules that it has made without their fields.
    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, theirs = vars(self), vars(other)
        return all(mine.get(name) == theirs.get(name) for name in self._fields)

    def __getstate__(self) -> dict[str, Any]:
        # Without the frame: a pickle or a copy holds the module, not the variables of a call.
        state = {name: value for name, value in vars(self).items() if name != "_frame"}
        return {name: getattr(value, "recipe", value) for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            vars(self)[name] = initialiser(value.draw, *value.settings) if isinstance(value, DrawRecipe) else value

    def __hash__(self) -> int:
        held = vars(self)
        return hash((type(self), *(held.get(name) for name in self._fields)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TransformError(
            f"{type(self).__name__} does not define `__call__`",
            fix="rename its `forward`" if hasattr(self, "forward") else "define it, or name a `method=`",
        )

    # ---- from outside

    def init(
        self,
        key: Key | Mapping[str, Key],
        *args: Any,
        device: torch.device | str | None = None,
        method: Method | None = None,
        **kwargs: Any,
    ) -> Tree:
        """Return variables for inputs like the example. Shapes are inferred without computing; each value is made once.

        `key` is one key, or keys by stream (`params` makes parameters). `device` defaults to the example's. `method`
        names another method than `__call__`, one that uses every child.
        """
        root = root_key(key)
        where = torch.device(device) if device is not None else device_of((args, kwargs))
        return unflatten(
            {
                (collection, *path): made(declaration, root, where)
                for (collection, path), declaration in self.declarations(*args, method=method, **kwargs).items()
            }
        )

    def init_with_output(self, key: Key | Mapping[str, Key], *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        """Return `(output, variables)`; the variables are the initial ones, without what the call wrote."""
        variables = self.init(key, *args, **kwargs)
        rngs = {"params": key} if isinstance(key, Key) else key
        output, _ = self.apply(variables, *args, rngs=rngs, mutable=True, **kwargs)
        return output, variables

    def apply(
        self,
        variables: Variables,
        *args: Any,
        rngs: Mapping[str, Key] | None = None,
        mutable: Mutable = False,
        method: Method | None = None,
        sharding: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the output for these variables; nothing else changes.

        With `mutable` (True, a collection or several) the result is `(output, updated)`, where `updated` is a tree of
        those collections. `method` names another method than `__call__`. `sharding` is what `constrain` uses.
        """
        wanted = collections_of(mutable)
        context = Context(stores_of(variables), streams_of(rngs), wanted, sharding=sharding)
        bound = bound_at(self, Frame(context, None, ""))
        output = _chosen(bound, method)(*args, **kwargs)
        return (output, context.updated(variables)) if mutable is not False else output

    def bind(self: M, variables: Variables, *, rngs: Mapping[str, Key] | None = None, mutable: Mutable = False) -> M:
        """Return a copy that holds these variables, for exploration: call it and its methods directly."""
        return bound_at(self, Frame(Context(stores_of(variables), streams_of(rngs), collections_of(mutable)), None, ""))

    def unbind(self: M) -> tuple[M, Tree]:
        """Return the module without its variables, and the variables."""
        frame = self._frame
        if frame is None:
            raise UnboundModuleError(type(self).__name__, "unbind")
        return self.clone(), Tree(frame.variables())

    def clone(self: M, **changes: Any) -> M:
        """Return the module with other hyperparameters, unbound."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def spec(self, *args: Any, **kwargs: Any) -> Tree:
        """Return the shape, dtype and axis names of every variable for inputs like the example, without allocating."""
        found = self.declarations(*args, **kwargs)
        return unflatten({(at[0], *at[1]): Spec(one.shape, one.dtype, one.axes) for at, one in found.items()})

    def eval_shape(self, *args: Any, **kwargs: Any) -> Tree:
        """Return the variables that `init` would return, on the meta device."""
        found = self.declarations(*args, **kwargs)
        return unflatten(
            {(at[0], *at[1]): torch.empty(one.shape, dtype=one.dtype, device="meta") for at, one in found.items()}
        )

    def declarations(self, *args: Any, method: Method | None = None, **kwargs: Any) -> dict[Place, Declaration]:
        """Run the module on stand-ins without data and collect what it declares, in the order of use."""
        leaves = checked_example((args, kwargs))
        context = Context({}, {}, None, declared={}, device=device_of((args, kwargs)))
        mode = fake_tensor_mode(leaves)
        with mode, torch.no_grad():
            fake_args, fake_kwargs = pytree.tree_map_only(Tensor, functools.partial(stand_in, mode), (args, kwargs))
            try:
                _chosen(bound_at(self, Frame(context, None, "")), method)(*fake_args, **fake_kwargs)
            except data_dependent_error() as error:
                place = "; ".join(getattr(error, "__notes__", ()))
                raise TransformError(
                    f"the module reads a number of its input ({place}), which has no data while shapes are inferred",
                    fix="choose with `torch.where`, or ask only `if not self.is_initialising`",
                ) from None
        assert context.declared is not None
        return context.declared

    # ---- from inside `__call__`

    def param(
        self,
        name: str,
        init: Initialiser,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        axes: Axes | None = None,
    ) -> Tensor:
        """Declare and read a parameter; `axes` are the logical names of its dimensions (see `partitioning`)."""
        frame = self._frame
        if frame is None:
            raise UnboundModuleError(type(self).__name__, f"the parameter {name!r}")
        return frame.param(name, init, shape, dtype, axes)

    def child(self, name: str, module: M) -> M:
        """Bind a module under this one by a name; keep the result in a local variable to use it twice."""
        frame = self._frame
        if frame is None:
            raise UnboundModuleError(type(self).__name__, f"the child {name!r}")
        if not isinstance(module, Module):
            fix = "pass `from_torch(module)`" if isinstance(module, torch.nn.Module) else "pass an instance, `Dense(8)`"
            kind = module.__name__ if isinstance(module, type) else f"of type {type(module).__name__}"
            raise TransformError(f"{dotted(self.path)}: the child {name!r} is {kind}, not a module", fix=fix)
        if module._frame is not None:
            at = ".".join(module._frame.path)
            raise TransformError(f"the child {name!r} is already bound at {at!r}", fix="call it without `child`")
        frame.claim("child", name)
        return bound_at(module, Frame(frame.context, frame, name))

    def within(self: M, parent: Module) -> M:
        """Bind this module in the place of another one, sharing its names: for wrappers that add no level."""
        return bound_at(self, parent._bound_frame("within"))

    def variable(
        self, collection: str, name: str, init: Callable[..., Tensor], *args: Any, axes: Axes | None = None
    ) -> Variable:
        """Declare a variable of a collection (`batch_stats`, `cache`, ...); read and assign its `value`.

        `init(*args)` makes the initial value from shapes alone: it must not depend on the input's numbers.
        """
        frame = self._bound_frame(f"the variable {name!r}")
        frame.claim("variable", name)
        if frame.read(collection, name) is None:
            if frame.context.declared is not None:
                stand_in = init(*args)
                frame.declare(
                    collection,
                    name,
                    tuple(stand_in.shape),
                    stand_in.dtype,
                    axes,
                    lambda _key, device: with_numbers(init(*args), name, frame).to(device),
                )
                frame.write(collection, name, stand_in)
            elif frame.context.is_mutable(collection):
                frame.write(collection, name, init(*args))
            else:
                if collection not in frame.context.stores:
                    raise MissingCollectionError(collection, frame.path, frame.context.stores)
                store = frame.store(collection)
                raise MissingVariableError(collection, name, frame.path, store if isinstance(store, Mapping) else {})
        return Variable(frame, collection, name)

    def has_variable(self, collection: str, name: str) -> bool:
        """Return whether the variable exists."""
        return self._bound_frame(f"the variable {name!r}").read(collection, name) is not None

    def sow(self, collection: str, name: str, value: Any) -> bool:
        """Append a value to a tuple in a collection if the caller asked for that collection; else do nothing."""
        frame = self._bound_frame(f"sow of {name!r}")
        if frame.context.declared is not None or not frame.context.is_mutable(collection):
            return False
        frame.write(collection, name, (*(frame.read(collection, name) or ()), value))
        return True

    def perturb(self, name: str, value: Tensor, collection: str = "perturbations") -> Tensor:
        """Add a zero variable to a value, so that the gradient with respect to the value can be asked for."""
        frame = self._bound_frame(f"perturb of {name!r}")
        if frame.context.declared is not None:
            shape, dtype = tuple(value.shape), value.dtype
            frame.declare(
                collection, name, shape, dtype, None, lambda _, device: torch.zeros(shape, dtype=dtype, device=device)
            )
            return value
        stored = frame.read(collection, name)
        return value if stored is None else value + stored

    def make_key(self, stream: str = "dropout") -> Key:
        """Return a fresh key of a named stream, different for every module and draw."""
        return self._bound_frame(f"a key of {stream!r}").make_key(stream)

    def constrain(self, value: Tensor, axes: Axes) -> Tensor:
        """Shard an activation by the logical names of its dimensions, if `apply` was given a sharding."""
        frame = self._frame
        if frame is None or frame.context.sharding is None:
            return value
        return frame.context.sharding.constrain(value, axes)  # type: ignore[no-any-return]

    @property
    def is_initialising(self) -> bool:
        """Whether shapes are being inferred, without data."""
        return self._frame is not None and self._frame.context.declared is not None

    @property
    def path(self) -> tuple[str, ...]:
        """The path from the root module to this one."""
        return () if self._frame is None else self._frame.path

    def _bound_frame(self, what: str) -> Frame:
        if self._frame is None:
            raise UnboundModuleError(type(self).__name__, what)
        return self._frame


_compilers_know_dicts = TorchVersion(torch.__version__) >= "2.13"

# Names that a subclass would take from the machinery, and break it far from here.
_OF_EVERY_MODULE = frozenset(name for name in vars(Module) if not name.startswith("__"))


def bound_at(module: M, frame: Frame) -> M:
    """Return a copy of a module that is bound to a frame."""
    # A direct copy: running the generated __init__ again costs three times as much, and compilers trace all of it.
    copy = object.__new__(type(module))
    if _compilers_know_dicts or not torch.compiler.is_compiling():
        fields = copy.__dict__
        fields.update(module.__dict__)
        fields["_frame"] = frame
        return copy
    for name in module._fields:
        object.__setattr__(copy, name, getattr(module, name))
    object.__setattr__(copy, "_frame", frame)
    return copy


def _explained(init: Callable[..., None], cls: type[Module]) -> Callable[..., None]:
    """Wrap a generated `__init__` to explain an unknown argument, such as flax's name of a field."""
    fields = frozenset(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @functools.wraps(init)
    def wrapped(self: Module, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in fields:
                raise UnknownArgumentError(cls.__name__, name, fields)
        init(self, *args, **kwargs)

    return wrapped


def _entered(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a module's method to open its frame: a name may be used once in each outermost call."""
    is_call = name == "__call__"

    @functools.wraps(method)
    def entered(self: Module, /, *args: Any, **kwargs: Any) -> Any:
        frame = self._frame
        if frame is None:
            if is_call:
                raise UnboundModuleError(type(self).__name__, "calling it")
            return method(self, *args, **kwargs)
        if frame.depth:
            return method(self, *args, **kwargs)
        if frame.names:
            frame.names = set()
        frame.depth = 1
        try:
            hook = frame.context.hook
            if hook is not None and is_call:
                return hook(self, method, args, kwargs)
            return method(self, *args, **kwargs)
        except Exception as error:
            # Torch's errors do not name the module: the innermost one adds its path.
            if not getattr(error, "__notes__", None):
                error.add_note(f"in {type(self).__name__} at {dotted(frame.path)}")
            raise
        finally:
            frame.depth = 0

    return entered


def _chosen(bound: Module, method: Method | None) -> Callable[..., Any]:
    if method is None:
        return bound
    if isinstance(method, str):
        found = getattr(bound, method, None)
        if not callable(found):
            own = [name for name in dir(type(bound)) if name not in _OF_EVERY_MODULE and not name.startswith("_")]
            close = nearest(method, own)
            raise TransformError(
                f"{type(bound).__name__} has no method {method!r}",
                fix=f"did you mean {close!r}?" if close else f"it has {', '.join(own) or 'only `__call__`'}",
            )
        return found  # type: ignore[no-any-return]
    # `method=model.encode` belongs to a module without variables: take its function and bind this module.
    return functools.partial(getattr(method, "__func__", method), bound)
