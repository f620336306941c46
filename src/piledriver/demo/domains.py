"""Text domains for the demo from files that every machine with Python has; nothing is downloaded."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from piledriver.core.random import Stream

_DOCUMENTED = ("numpy", "pyarrow", "lxml")


@dataclass(frozen=True)
class Domain:
    """A kind of text: its name, the source that reads it, and its files."""

    name: str
    source: str
    paths: list[str]


def find_domains(staging: Path, bytes_each: int, seed: int) -> list[Domain]:
    """Return the domains found on this machine, each with about `bytes_each` of files, drawn by the seed.

    Text that is not in files (package descriptions, manual chapters, docstrings) is written below `staging`.
    """
    choose = Stream(seed, "demo")
    library = Path(sysconfig.get_paths()["stdlib"])
    headers = [Path(sysconfig.get_paths()["include"]), Path("/usr/include")]
    candidates = [
        ("Python code", "code", _below([library], ".py", without=("test", "tests", "site-packages", "idlelib"))),
        ("C headers", "code", _below(headers, ".h")),
        ("Type stubs", "code", _below(map(Path, _sites()), ".pyi")),
        ("Package READMEs", "markdown", _readmes(staging / "readmes")),
        ("Python manual", "text", _manual(staging / "manual")),
        ("Docstrings", "text", _docstrings(staging / "docstrings")),
        ("Licences", "text", _licences()),
        ("System documents", "text", _below([Path("/usr/share/doc")], "copyright")),
        ("Web pages", "html", _below([Path("/usr/share")], ".html")),
    ]
    return [
        Domain(name, source, chosen)
        for name, source, files in candidates
        if (chosen := _drawn(files, bytes_each, choose.child(name)))
    ]


def _below(roots: Iterable[Path], suffix: str, without: tuple[str, ...] = ()) -> Iterator[Path]:
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name not in without)
            yield from (Path(folder) / name for name in sorted(names) if name.endswith(suffix))


def _sites() -> list[str]:
    """Return the package folders of `sys.path`, without entries that packages added on import."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def _packages() -> list[metadata.Distribution]:
    return sorted(metadata.distributions(path=_sites()), key=lambda found: found.metadata["Name"] or "")


def _readmes(folder: Path) -> Iterator[Path]:
    """Write the descriptions of the installed packages and yield the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in _packages():
        # Not the payload, which importlib_metadata empties on import.
        text = package.metadata.json.get("description")
        if isinstance(text, str) and len(text) > 500:
            path = folder / f"{package.metadata['Name']}.md"
            path.write_text(text, encoding="utf-8", errors="replace")
            yield path


def _manual(folder: Path) -> Iterator[Path]:
    """Write the chapters of Python's reference manual that `help()` shows and yield the files."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sorted(topics.items()):
        path = folder / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        yield path


def _docstrings(folder: Path) -> Iterator[Path]:
    """Write the docstrings of the packages that a corpus build needs, one file a module, and yield the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in _DOCUMENTED:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            continue
        root = Path(found.origin).parent
        for source in _below([root], ".py", without=("test", "tests")):
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            nodes = ast.walk(ast.parse(source.read_bytes()))
            texts = [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
            name = ".".join(source.relative_to(root.parent).with_suffix("").parts)
            path = folder / f"{name}.txt"
            path.write_text("\n\n".join(text for text in texts if text), encoding="utf-8", errors="replace")
            yield path


def _licences() -> Iterator[Path]:
    yield from _below([Path("/usr/share/common-licenses")], "")
    for package in _packages():
        for file in package.files or []:
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
                path = Path(str(package.locate_file(file)))
                if path.is_file():
                    yield path


def _drawn(files: Iterable[Path], bytes_wanted: int, choose: Stream) -> list[str]:
    """Return files in random order up to `bytes_wanted`, without any that would dominate the domain."""
    sized = [(path, path.stat().st_size) for path in files if path.is_file() and not path.is_symlink()]
    chosen, total = [], 0
    for path, size in choose.shuffled(sized):
        if 200 <= size <= bytes_wanted // 4:
            chosen.append(str(path))
            total += size
        if total >= bytes_wanted:
            break
    return sorted(chosen) if total >= bytes_wanted // 20 else []
