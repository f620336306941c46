"""From an opened checkpoint to live objects: match first, say what does not fit, then read straight into place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piledriver.checkpoint import accelerate_folder, names, tree
from piledriver.checkpoint.contents import Contents, is_torch_optimizer
from piledriver.checkpoint.errors import CheckpointError
from piledriver.checkpoint.loading.optimizer import OptimizerMatch, match_optimizer
from piledriver.checkpoint.loading.report import LoadReport
from piledriver.checkpoint.snapshot import Snapshot, open_ours
from piledriver.checkpoint.tensor_index import read_into
from piledriver.core.errors import UsageError
from piledriver.runtime.seeds import restore_rng

KINDS = ("models", "optimizers", "schedulers", "loaders", "custom", "scaler", "rng", "per_rank")
KeyMap = Mapping[str, str] | Callable[[str], str | None]


def open_snapshot(folder: Path, rank: int) -> Snapshot:
    """Open a checkpoint of ours, or a folder that Accelerate wrote."""
    if not (folder / "header.json").exists() and accelerate_folder.is_accelerate_folder(folder):
        return accelerate_folder.open_accelerate(folder, rank)
    return open_ours(folder, rank)


@dataclass
class Matching:
    """What will be read and done, and what did not fit. Nothing has changed yet."""

    snapshot: Snapshot
    reads: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    finishers: list[Callable[[], None]] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def report(self) -> LoadReport:
        """What would happen, or has happened."""
        return LoadReport(
            matched=tuple(sorted(self.matched)),
            missing=tuple(sorted(self.missing)),
            unexpected=tuple(sorted(self.unexpected)),
            reshaped=dict(self.reshaped),
            notes=tuple(self.notes),
            step=self.snapshot.step,
            layout=self.snapshot.layout,
            extra=self.snapshot.extra,
        )

    def run(self) -> LoadReport:
        """Read every tensor into its place, then hand the rest to `load_state_dict`."""
        read_into(self.snapshot.catalog, self.reads)
        for finish in self.finishers:
            finish()
        return self.report()

    def fresh(self, like: Mapping[str, torch.Tensor]) -> tree.GetTensor:
        """A getter that allocates a tensor, on the device and in the layout of one in `like` where there is one."""

        def get(found: Mapping[str, Any]) -> torch.Tensor:
            key = found["key"]
            entry = self.snapshot.catalog[key]
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


def match(
    snapshot: Snapshot, contents: Contents, *, key_map: KeyMap | None = None, only: Collection[str] | None = None
) -> Matching:
    """Match a snapshot with live objects, kind by kind."""
    for kind in only or ():
        if kind not in KINDS:
            raise UsageError(f"unknown kind {kind!r} in only", fix=f"choose from {', '.join(KINDS)}")
    wanted = set(KINDS if only is None else only)
    matching = Matching(snapshot, notes=list(snapshot.notes))
    if "models" in wanted:
        _each(matching, "models", contents.models, functools.partial(_model, key_map=key_map))
    if "optimizers" in wanted:
        parameter_names = names.parameter_names(contents.models)
        _each(matching, "optimizers", contents.optimizers, functools.partial(_optimizer, parameter_names))
    for kind, things in (
        ("schedulers", contents.schedulers),
        ("custom", contents.custom),
        ("scaler", [] if contents.scaler is None else [contents.scaler]),
    ):
        if kind in wanted:
            _each(matching, kind, things, functools.partial(_stateful, kind))
    if "loaders" in wanted:
        loaders = {f"loaders/{i}": loader for i, loader in enumerate(contents.loaders) if hasattr(loader, "state_dict")}
        _own(matching, loaders)
    if "per_rank" in wanted:
        _own(matching, {f"per_rank/{name}": thing for name, thing in contents.per_rank.items()})
    if "rng" in wanted and contents.rng:
        _random(matching)
    return matching


def _each(
    matching: Matching, kind: str, things: Sequence[Any], matcher: Callable[[Matching, int, Any, tree.Json], None]
) -> None:
    saved = matching.snapshot.shared.get(kind, [])
    for index, thing in enumerate(things):
        if index < len(saved):
            matcher(matching, index, thing, saved[index])
        else:
            matching.missing.append(f"{kind}/{index}")
    matching.unexpected += [f"{kind}/{index}" for index in range(len(things), len(saved))] if things else []


def _model(matching: Matching, index: int, model: nn.Module, saved: tree.Json, *, key_map: KeyMap | None) -> None:
    wanted = names.model_state(model)
    offered = _renamed(saved, key_map)
    covered: set[int] = set()
    uncovered: list[str] = []
    for name, value in wanted.items():
        found = offered.pop(name, None)
        if found is None:
            uncovered.append(name)
        elif isinstance(value, torch.Tensor):
            _tensor(matching, f"models/{index}/{name}", found, value)
            covered.add(id(value))
        else:
            _extra_state(matching, model, f"models/{index}/{name}", name, found)
    for name in uncovered:
        # A tied parameter may be saved under only one of its names.
        full = f"models/{index}/{name}"
        (matching.matched if id(wanted[name]) in covered else matching.missing).append(full)
    # A name of a tied weight that is left over is not news, if the weight itself has a place.
    used = {key for key, _ in matching.reads}
    matching.unexpected += [
        f"models/{index}/{name}" for name, found in offered.items() if not used & set(tree.tensor_keys(found))
    ]


def _tensor(matching: Matching, name: str, found: tree.Json, value: torch.Tensor) -> None:
    key = found["key"]
    saved_shape = matching.snapshot.catalog[key].shape
    if value.is_meta:
        raise CheckpointError(f"{name} is on the meta device", fix="call model.to_empty(device=...) before loading")
    if saved_shape != tuple(value.shape):
        matching.reshaped[name] = (saved_shape, tuple(value.shape))
        return
    matching.reads.append((key, value.detach()))
    matching.matched.append(name)


def _extra_state(matching: Matching, model: nn.Module, full: str, name: str, found: tree.Json) -> None:
    value = tree.rebuild(found, matching.fresh({}))
    matching.finishers.append(lambda: _ignore(names.bare(model).load_state_dict({name: value}, strict=False)))
    matching.matched.append(full)


def _renamed(saved: tree.Json, key_map: KeyMap | None) -> dict[str, tree.Json]:
    pairs = tree.pairs(saved)
    if key_map is None:
        return dict(pairs)
    rename = key_map if callable(key_map) else functools.partial(_by_prefix, key_map)
    return {new: found for key, found in pairs if (new := rename(key)) is not None}


def _by_prefix(prefixes: Mapping[str, str], key: str) -> str:
    """The longest prefix that fits is replaced."""
    fitting = max((prefix for prefix in prefixes if key.startswith(prefix)), key=len, default=None)
    return key if fitting is None else prefixes[fitting] + key[len(fitting) :]


def _optimizer(
    parameter_names: Mapping[int, str], matching: Matching, index: int, optimizer: Any, saved: tree.Json
) -> None:
    inner = names.inner_optimizer(optimizer)
    if not is_torch_optimizer(inner):
        _stateful("optimizers", matching, index, optimizer, saved)
        return
    found: OptimizerMatch = match_optimizer(inner, parameter_names, saved, matching.snapshot)
    prefix = f"optimizers/{index}/"
    matching.reads += found.reads
    matching.finishers.append(found.finish)
    matching.matched += [prefix + name for name in found.matched]
    matching.missing += [prefix + name for name in found.missing]
    matching.unexpected += [prefix + name for name in found.unexpected]


def _stateful(kind: str, matching: Matching, index: int, thing: Any, saved: tree.Json) -> None:
    if saved == {}:
        return  # a disabled GradScaler saves nothing and refuses to load nothing
    _, now = tree.split(thing.state_dict(), f"{kind}/{index}")
    state = tree.rebuild(saved, matching.fresh(now))
    matching.finishers.append(lambda: _ignore(thing.load_state_dict(state)))
    matching.matched.append(f"{kind}/{index}")


def _own(matching: Matching, things: Mapping[str, Any]) -> None:
    for name, thing in things.items():
        if name not in matching.snapshot.own:
            if matching.snapshot.header is None:
                matching.notes.append(f"the folder holds no state of {name}")
            else:
                matching.missing.append(name)
            continue
        state = tree.rebuild(matching.snapshot.own[name], tree.from_inline)
        matching.finishers.append(functools.partial(thing.load_state_dict, state))
        matching.matched.append(name)


def _random(matching: Matching) -> None:
    saved = matching.snapshot.own.get("rng")
    if saved is None:
        matching.notes.append("no random state was saved for this rank; its generators are left as they are")
        return
    state = tree.rebuild(saved, tree.from_inline)
    # Last, so that nothing that the other objects do while loading draws from the restored generators.
    matching.finishers.append(lambda: matching.notes.extend(restore_rng(state)))
    matching.matched.append("rng")


def _ignore(_: object) -> None:
    return None
