"""Import alias: `import accelerate` gives our compatible modules, without editing a script."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any


def install_alias(name: str, target: str) -> None:
    """Import `name` and its submodules as `target`; modules are shared, so that classes are the same under both."""
    if not any(isinstance(finder, _AliasFinder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder(name, target))


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds `name.x.y` at `target.x.y`."""

    def __init__(self, name: str, target: str) -> None:
        self.name = name
        self.target = target

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that loads the target module, if the name is aliased and that module exists."""
        if fullname != self.name and not fullname.startswith(self.name + "."):
            return None
        real = self.target + fullname[len(self.name) :]
        found = importlib.util.find_spec(real)
        if found is None:
            return None
        package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _AliasLoader(real), origin=found.origin, is_package=package)

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        """Yield a distribution of the alias, so that a package that asks `importlib.metadata` finds it installed."""
        if getattr(context, "name", None) in (None, self.name):
            yield _AliasDistribution(self.name, self.target)


class _AliasDistribution(metadata.Distribution):
    """Metadata of an aliased package: its name, its top-level module and the version that the target mirrors."""

    def __init__(self, alias: str, target: str) -> None:
        self.alias = alias
        self.target = target

    def read_text(self, filename: str) -> str | None:
        """Return the content of a metadata file."""
        if filename == "top_level.txt":
            return f"{self.alias}\n"
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        target = importlib.import_module(self.target)
        origin = f"Home-page: {target.__url__}\n" if hasattr(target, "__url__") else ""
        return f"Metadata-Version: 2.1\nName: {self.alias}\nVersion: {target.__version__}\n{origin}"

    def locate_file(self, path: Any) -> Any:
        """Return a path beside the target's package."""
        return Path(importlib.import_module(self.target).__path__[0]).parent / path


class _AliasLoader(importlib.abc.Loader):
    """Loads a module by importing another."""

    def __init__(self, real: str) -> None:
        self.real = real
        self._kept: dict[str, object] = {}

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the target module."""
        module = importlib.import_module(self.real)
        self._kept = {name: getattr(module, name, None) for name in ("__spec__", "__loader__", "__package__")}
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the target module's own attributes, which the import system has overwritten."""
        for name, value in self._kept.items():
            setattr(module, name, value)
