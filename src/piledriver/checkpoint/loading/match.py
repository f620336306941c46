"""Match an opened checkpoint with live objects, report what differs, then read tensors into place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from piledriver.checkpoint import parameter_names, state_tree
from piledriver.checkpoint.contents import Contents, is_torch_optimizer
from piledriver.checkpoint.errors import CheckpointError
from piledriver.checkpoint.loading.optimizer import OptimizerMatch, match_optimizer, model_shapes
from piledriver.checkpoint.loading.report import LoadReport
from piledriver.checkpoint.opened_checkpoint import OpenedCheckpoint
from piledriver.checkpoint.saving.rank_group import RankGroup
from piledriver.checkpoint.tensor_index import read_into
from piledriver.core.errors import UsageError
from piledriver.runtime.seeds import restore_rng

KINDS = ("models", "optimizers", "schedulers", "loaders", "custom", "scaler", "rng", "per_rank")
KeyMap = Mapping[str, str] | Callable[[str], str | None]


@dataclass
class StateMatch:
    """What a load will read, and what does not match. No object is changed before `load`."""

    opened: OpenedCheckpoint
    reads: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    on_loaded: list[Callable[[], object]] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def report(self) -> LoadReport:
        """Return the report of the load, before or after it."""
        return LoadReport(
            matched=tuple(sorted(self.matched)),
            missing=tuple(sorted(self.missing)),
            unexpected=tuple(sorted(self.unexpected)),
            reshaped=dict(self.reshaped),
            notes=tuple(self.notes),
            step=self.opened.step,
            layout=self.opened.layout,
            extra=self.opened.extra,
        )

    def load(self) -> LoadReport:
        """Read every tensor into place, then call `load_state_dict` of the other objects."""
        read_into(self.opened.index, self.reads)
        for call in self.on_loaded:
            call()
        return self.report()

    def allocator(self, like: Mapping[str, torch.Tensor]) -> state_tree.GetTensor:
        """Return a getter that allocates a tensor, with the device and placements of that of its key in `like`."""

        def get(found: Mapping[str, Any]) -> torch.Tensor:
            key = found["key"]
            entry = self.opened.index[key]
            example = like.get(key)
            fits = example is not None and tuple(example.shape) == entry.shape
            made = (
                torch.empty_like(example, dtype=entry.dtype, requires_grad=False)
                if example is not None and fits
                else torch.empty(entry.shape, dtype=entry.dtype)
            )
            self.reads.append((key, made))
            return made

        return get


def load_matching(
    opened: OpenedCheckpoint,
    contents: Contents,
    ranks: RankGroup,
    *,
    strict: bool,
    key_map: KeyMap | None = None,
    only: Collection[str] | None = None,
) -> LoadReport:
    """Match an opened checkpoint with live objects on all ranks and load it; with `strict`, raise if keys differ."""
    doing = "matching the checkpoint"
    matched = ranks.run_checked(doing, lambda: match_state(opened, contents, key_map=key_map, only=only))
    # A pipeline stage does not know the keys of others: unexpected is what no rank expects.
    matched.unexpected = sorted(set.intersection(*map(set, ranks.all_gather(matched.unexpected))))
    if strict:
        ranks.run_checked(doing, matched.report().raise_unless_exact)
    return ranks.run_checked("loading", matched.load)


def match_state(
    opened: OpenedCheckpoint, contents: Contents, *, key_map: KeyMap | None = None, only: Collection[str] | None = None
) -> StateMatch:
    """Match an opened checkpoint with live objects, kind by kind."""
    for kind in only or ():
        if kind not in KINDS:
            raise UsageError(f"only: unknown kind {kind!r}", fix=f"choose from {', '.join(KINDS)}")
    wanted = set(KINDS if only is None else only)
    match = StateMatch(opened, notes=list(opened.notes))
    if "models" in wanted:
        _each(match, "models", contents.models, functools.partial(_model, key_map=key_map))
    if "optimizers" in wanted:
        names = parameter_names.names_by_id(contents.named_by or contents.models)
        # Where models are missing from the checkpoint, the numbers of those in it say nothing about names.
        shapes = {} if len(contents.named_by) > len(contents.models) else model_shapes(opened)
        _each(match, "optimizers", contents.optimizers, functools.partial(_optimizer, names, shapes))
    for kind, things in (
        ("schedulers", contents.schedulers),
        ("custom", contents.custom),
        ("scaler", [] if contents.scaler is None else [contents.scaler]),
    ):
        if kind in wanted:
            _each(match, kind, things, functools.partial(_stateful, kind))
    if "loaders" in wanted:
        loaders = {f"loaders/{i}": loader for i, loader in enumerate(contents.loaders) if hasattr(loader, "state_dict")}
        _own(match, loaders)
    if "per_rank" in wanted:
        _own(match, {f"per_rank/{name}": thing for name, thing in contents.per_rank.items()})
    if "rng" in wanted and contents.rng:
        _random(match)
    return match


def _each(
    match: StateMatch,
    kind: str,
    things: Sequence[Any],
    matcher: Callable[[StateMatch, int, Any, state_tree.Json], None],
) -> None:
    saved = match.opened.shared.get(kind, [])
    for index, thing in enumerate(things):
        if index < len(saved):
            matcher(match, index, thing, saved[index])
        else:
            match.missing.append(f"{kind}/{index}")
    match.unexpected += [f"{kind}/{index}" for index in range(len(things), len(saved))] if things else []


def _model(match: StateMatch, index: int, model: nn.Module, saved: state_tree.Json, *, key_map: KeyMap | None) -> None:
    wanted = parameter_names.model_state(model)
    offered = _renamed(saved, key_map)
    covered: set[int] = set()
    uncovered: list[str] = []
    for name, value in wanted.items():
        found = offered.pop(name, None)
        if found is None:
            uncovered.append(name)
        elif isinstance(value, torch.Tensor):
            _tensor(match, f"models/{index}/{name}", found, value)
            covered.add(id(value))
        else:
            _extra_state(match, model, f"models/{index}/{name}", name, found)
    for name in uncovered:
        # A tied parameter may be saved under one of its names only.
        full = f"models/{index}/{name}"
        (match.matched if id(wanted[name]) in covered else match.missing).append(full)
    # Another name of a tied weight that is loaded is not unexpected.
    used = {key for key, _ in match.reads}
    match.unexpected += [
        f"models/{index}/{name}" for name, found in offered.items() if not used & set(state_tree.tensor_keys(found))
    ]


def _tensor(match: StateMatch, name: str, found: state_tree.Json, value: torch.Tensor) -> None:
    key = found["key"]
    saved_shape = match.opened.index[key].shape
    if value.is_meta:
        raise CheckpointError(f"{name} is on the meta device", fix="call model.to_empty(device=...) before loading")
    if saved_shape != tuple(value.shape):
        match.reshaped[name] = (saved_shape, tuple(value.shape))
        return
    match.reads.append((key, value.detach()))
    match.matched.append(name)


def _extra_state(match: StateMatch, model: nn.Module, full: str, name: str, found: state_tree.Json) -> None:
    value = state_tree.rebuild_state(found, match.allocator({}))
    unwrapped = parameter_names.unwrap_model(model)
    match.on_loaded.append(functools.partial(unwrapped.load_state_dict, {name: value}, strict=False))
    match.matched.append(full)


def _renamed(saved: state_tree.Json, key_map: KeyMap | None) -> dict[str, state_tree.Json]:
    pairs = state_tree.mapping_items(saved)
    if key_map is None:
        return dict(pairs)
    rename = key_map if callable(key_map) else functools.partial(_by_prefix, key_map)
    return {new: found for key, found in pairs if (new := rename(key)) is not None}


def _by_prefix(prefixes: Mapping[str, str], key: str) -> str:
    """Replace the longest matching prefix."""
    fitting = max((prefix for prefix in prefixes if key.startswith(prefix)), key=len, default=None)
    return key if fitting is None else prefixes[fitting] + key[len(fitting) :]


def _optimizer(
    names: Mapping[int, str],
    shapes: Mapping[str, tuple[int, ...]],
    match: StateMatch,
    index: int,
    optimizer: Any,
    saved: state_tree.Json,
) -> None:
    inner = parameter_names.unwrap_optimizer(optimizer)
    if not is_torch_optimizer(inner):
        _stateful("optimizers", match, index, optimizer, saved)
        return
    found: OptimizerMatch = match_optimizer(inner, names, saved, match.opened, shapes)
    prefix = f"optimizers/{index}/"
    match.reads += found.reads
    match.on_loaded.append(found.load)
    match.matched += [prefix + name for name in found.matched]
    match.missing += [prefix + name for name in found.missing]
    match.unexpected += [prefix + name for name in found.unexpected]


def _stateful(kind: str, match: StateMatch, index: int, thing: Any, saved: state_tree.Json) -> None:
    if saved == {}:
        return  # a disabled GradScaler saves an empty state and does not load one
    _, now = state_tree.split_state(thing.state_dict(), f"{kind}/{index}")
    state = state_tree.rebuild_state(saved, match.allocator(now))
    match.on_loaded.append(functools.partial(thing.load_state_dict, state))
    match.matched.append(f"{kind}/{index}")


def _own(match: StateMatch, things: Mapping[str, Any]) -> None:
    for name, thing in things.items():
        if name not in match.opened.own:
            if match.opened.header is None:
                match.notes.append(f"no state of {name} was saved")
            else:
                match.missing.append(name)
            continue
        state = state_tree.rebuild_state(match.opened.own[name], state_tree.tensor_from_inline)
        match.on_loaded.append(functools.partial(thing.load_state_dict, state))
        match.matched.append(name)


def _random(match: StateMatch) -> None:
    saved = match.opened.own.get("rng")
    if saved is None:
        match.notes.append("no random state was saved for this rank; its generators are unchanged")
        return
    state = state_tree.rebuild_state(saved, state_tree.tensor_from_inline)
    # Last, so that loading other objects does not draw from the restored generators.
    match.on_loaded.append(lambda: match.notes.extend(restore_rng(state)))
    match.matched.append("rng")
