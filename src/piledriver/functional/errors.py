"""Errors of functional modules, one class per cause; each message names the module path and the fix.

`path` in a message leads from the root module to the one at fault: `decoder.layers_3.attention`, or `(root)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from piledriver.core.errors import PiledriverError, UsageError, nearest, suggest


def dotted(path: Sequence[str]) -> str:
    """Return a path as text.

    >>> dotted(("decoder", "mlp")), dotted(())
    ('decoder.mlp', '(root)')
    """
    return ".".join(path) or "(root)"


class FunctionalError(PiledriverError):
    """The base of every error of this room."""


class ImmutableTreeError(FunctionalError):
    """A tree of variables was written to. Trees never change; make a new one with `set`, `without` or `merge`."""

    def __init__(self, action: str) -> None:
        super().__init__(
            f"trees are immutable: {action} would change one in place",
            fix="make a new tree, `new = tree.set('a.b', value)`, `tree.without('a.b')` or `tree.merge(other)`",
        )


class FrozenModuleError(FunctionalError):
    """A field of a module was assigned. Modules are frozen; state lives in variables, another setting in a copy."""

    def __init__(self, module: str, field: str) -> None:
        super().__init__(
            f"{module} is frozen: cannot assign its field {field!r}",
            fix=f"make another module with `module.clone({field}=...)`, "
            f"or hold state with `self.variable(collection, {field!r}, ...)`",
        )


class UnknownArgumentError(FunctionalError, TypeError):
    """A module was given an argument that is not one of its fields. Flax's name for a field is answered with ours."""

    __str__ = Exception.__str__

    def __init__(self, module: str, name: str, fields: Iterable[str]) -> None:
        known = sorted(fields)
        ours = next((one for one in _FLAX_FIELDS.get(name, ()) if one in known), None)
        fix = f"flax's {name!r} is {ours!r} here" if ours else suggest(name, known)
        if name in ("name", "parent"):
            fix = f"name a module where it is used: `self.child('up', {module}(...))`"
        super().__init__(f"{module} has no field {name!r}", fix=fix)


# What other libraries, flax first, call the fields of our modules.
_FLAX_FIELDS = {
    "kernel_size": ("window",),
    "kernel_dilation": ("dilation",),
    "feature_group_count": ("groups",),
    "num_groups": ("groups",),
    "num_heads": ("heads",),
    "num_embeddings": ("count",),
    "axis": ("dims",),
    "rng_collection": ("stream",),
    "recurrent_kernel_init": ("recurrent_init",),
    "activation_fn": ("activation",),
    "layer_instance": ("layer",),
    "collection_name": ("collection",),
    "n_steps": ("steps",),
    "feature_axes": ("feature_dims",),
    "forward_rnn": ("forward",),
    "backward_rnn": ("backward",),
    "out_features": ("features",),
}


class UnboundModuleError(UsageError, FunctionalError):
    """A module was called on its own: it holds no parameters, so there is nothing to compute with."""

    def __init__(self, module: str, what: str) -> None:
        super().__init__(
            f"{module} is not bound to variables, so {what} has no parameters to use",
            fix="call `module.apply(variables, ...)` from outside, or `self.child(name, module)(...)` inside a module",
        )


class NameInUseError(FunctionalError):
    """One name was declared twice in one call of one module: both uses would silently share a value."""

    def __init__(self, kind: str, name: str, path: Sequence[str]) -> None:
        super().__init__(
            f"{dotted(path)}: the {kind} name {name!r} is used twice in one call",
            fix=f"give each its own name; to share one {kind}, keep it in a local variable and use that twice",
        )


class InvalidNameError(UsageError, FunctionalError):
    """A parameter, variable or child has a name that cannot stand in a path."""

    def __init__(self, name: object, path: Sequence[str]) -> None:
        super().__init__(
            f"{dotted(path)}: {name!r} cannot be a name", fix="use a non-empty string without dots, such as 'kernel'"
        )


class MissingCollectionError(FunctionalError):
    """`apply` was given variables without a collection that the module reads."""

    def __init__(self, collection: str, path: Sequence[str], known: Iterable[str]) -> None:
        have = ", ".join(sorted(known)) or "none"
        super().__init__(
            f"{dotted(path)}: the variables have no collection {collection!r} here (collections given: {have})",
            fix=f"pass all that `init` returned, or one collection of it by its name, {{'{collection}': ...}}",
        )


class MissingVariableError(FunctionalError):
    """The variables lack a parameter that the module declares: they belong to another architecture."""

    def __init__(self, collection: str, name: str, path: Sequence[str], known: Iterable[str]) -> None:
        names = list(known)
        close = nearest(name, names)
        hint = f"did you mean {close!r}? " if close else ""
        super().__init__(
            f"{dotted(path)}: no {name!r} in collection {collection!r} (has {', '.join(sorted(names)) or 'nothing'})",
            fix=f"{hint}initialise again with `init`, or move old weights over with `transfer`",
        )


class ParameterShapeError(FunctionalError):
    """A parameter's stored shape is not the one that the module declares for this input."""

    def __init__(self, name: str, path: Sequence[str], stored: Sequence[int], wanted: Sequence[int]) -> None:
        super().__init__(
            f"{dotted(path)}: parameter {name!r} is stored as {tuple(stored)}, but {tuple(wanted)} is needed for "
            "this input and these settings",
            fix="feed an input of the width used in `init`, to a module with the settings it had then, or `init` again",
        )


class InputShapeError(UsageError, FunctionalError):
    """An input has a shape or a type that a layer cannot take, or a function (`path` None: it has no place)."""

    def __init__(self, path: Sequence[str] | None, what: str, fix: str) -> None:
        super().__init__(what if path is None else f"{dotted(path)}: {what}", fix=fix)


class MissingKeyError(FunctionalError):
    """A module asked for random numbers of a stream for which no key was passed."""

    def __init__(self, stream: str, path: Sequence[str], known: Iterable[str]) -> None:
        have = ", ".join(sorted(known)) or "none"
        super().__init__(
            f"{dotted(path)}: needs a key of the stream {stream!r} (streams given: {have})",
            fix="pass `init` a key, or `{'params': key, ...}`"
            if stream == "params"
            else f"pass `rngs={{'{stream}': key}}` to apply, or `deterministic=True` to the module",
        )


class ImmutableCollectionError(FunctionalError):
    """A module wrote to a collection that the caller did not declare mutable: the new value would be lost."""

    def __init__(self, collection: str, name: str, path: Sequence[str], mutable: Iterable[str]) -> None:
        given = ", ".join(sorted(mutable)) or "none"
        super().__init__(
            f"{dotted(path)}: wrote {name!r} in collection {collection!r}, which is not mutable in this call "
            f"(mutable: {given})",
            fix=f"call `out, updated = module.apply(variables, ..., mutable=['{collection}'])`",
        )


class InitialiserError(FunctionalError):
    """An initialiser returned something that is not a fresh tensor of the declared shape."""

    def __init__(self, name: str, path: Sequence[str], what: str) -> None:
        super().__init__(
            f"{dotted(path)}: the initialiser of {name!r} {what}",
            fix="return a new tensor of the declared shape, made from the key and the shape alone",
        )


class TreeStructureError(FunctionalError):
    """Two trees that must have the same shape do not."""


class MissingNameError(TreeStructureError, KeyError):
    """A tree was asked for a name that it does not have. It is a KeyError too, as of any mapping."""

    # KeyError would show the message as a quoted string.
    __str__ = Exception.__str__

    def __init__(self, name: object, known: Iterable[str]) -> None:
        super().__init__(f"no {name!r} here", fix=suggest(str(name), known))


class PartitionError(UsageError, FunctionalError):
    """Logical axis names, rules and mesh do not fit together."""


class VariablesError(UsageError, FunctionalError):
    """`init` or `apply` was given something else where its variables or keys belong."""


class TransformError(UsageError, FunctionalError):
    """A transform was given something that it cannot transform."""
