"""The rules of the house that no linter holds: where files lie, what they are called, which words they use.

Exceptions stand beside each rule with their reason.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "piledriver"
FILES = sorted(path for path in SOURCE.rglob("*.py"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]

MOST_MODULES = 15
# Tables: one module for each entry.
WIDE_FOLDERS: dict[str, str] = {
    "corpus/sources": "one module or folder for each source",
    "cli": "one module for each verb",
    "observe/trackers": "one module for each tracker",
}
# Modules that share the first word of their names but no idea.
SHARED_PREFIXES: dict[str, str] = {"corpus/sources/pubmed": "two sources, each named after its slug"}
# Public names that several modules define on purpose.
SAME_NAMES: dict[str, str] = {
    "configure": "every verb of the command line has one",
    "run": "every verb of the command line has one",
    "main": "the entry point of a script",
    "available": "every tracker module has one",
    "load": "trackers import their package with it",
    "LayerNorm": "flax's name in functional, torch's in models",
    "RMSNorm": "flax's name in functional, torch's in models",
    "GatedMLP": "a layer of functional and a module of models",
    "cross_entropy": "a function of functional, and of torch's modules",
    "orthogonal": "flax's initialiser, and a transform of gradients",
    "trace": "optax's transform of gradients, and torch.fx's verb",
    "zeros": "flax's initialiser, and optax's",
}
# Rooms that speak another library's language.
FOREIGN = ("compat",)

WORDS = re.compile(
    r"\b(everybody|everyone|nobody|anybody|whoever|somebody|dear|goes on|go on|(?<!there )is none|said once|by hand"
    r"|is said|laid out|lay out|makes? ready|broke off)\b"
)
QUOTED = re.compile(r'"[^"\n]*"|`[^`\n]*`')
# Pages that quote the words, and the notebook, which is a record.
WORDS_ALLOWED = ("CONTRIBUTING.md", "docs/LOG.md")
MEASUREMENT = re.compile(
    r"\d (?:us|ms|GiB|GB|MB) (?:a|per) |\d[\d,.]*k? tokens/s|\b\d[\d.]* (?:to \d[\d.]* )?times (?:as )?(?:fast|slow)"
    r"|\d[\d.]*(?:x|%) (?:fast|slow)|\b(?:took|takes?) (?:about )?\d[\d.]* (?:us|ms|s|seconds|minutes)\b"
)


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT))


def modules(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def folders() -> Iterator[Path]:
    return (path for path in [SOURCE, *SOURCE.rglob("*")] if path.is_dir() and path.name != "__pycache__")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The comments and docstrings of a Python file, or the lines of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and token.string.lstrip("rbuRBU").startswith('"""')
        ):
            yield from enumerate(token.string.splitlines(), token.start[0])


def test_a_folder_has_few_modules() -> None:
    wide = {relative(folder) for folder in folders() if len(modules(folder)) > MOST_MODULES} - set(WIDE_FOLDERS)
    assert not wide, f"more than {MOST_MODULES} modules; make folders"


def test_files_that_share_a_prefix_are_a_folder() -> None:
    found: set[str] = set()
    for folder in folders():
        names = modules(folder)
        shared = Counter(name.split("_")[0] for name in names)
        found |= {f"{relative(folder)}/{word}" for word, count in shared.items() if count > 1}
    assert found <= set(SHARED_PREFIXES), "files share a prefix; make a folder"


def test_a_public_name_is_defined_once() -> None:
    where: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if relative(path).split("/")[0] not in FOREIGN:
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                    where[node.name].add(relative(path))
    allowed = set(SAME_NAMES)
    twice = {name: sorted(files) for name, files in where.items() if len(files) > 1 and name not in allowed}
    assert not twice, "defined more than once; rename one"


def test_the_words_are_the_fields() -> None:
    allowed = WORDS_ALLOWED
    found = [
        f"{relative(path)}:{line}: {text.strip()}"
        for path in [*FILES, *PAGES]
        if not relative(path).startswith(allowed)
        for line, text in prose(path)
        if WORDS.search(QUOTED.sub("", text.replace('"""', "")))
    ]
    assert not found, "write plain technical English; docs/glossary.md has the words"


def test_docstrings_hold_no_measurements() -> None:
    found = [
        f"{relative(path)}:{line}: {text.strip()}"
        for path in FILES
        for line, text in prose(path)
        if MEASUREMENT.search(text)
    ]
    assert not found, "figures belong to benchmarks/results and BENCHMARKS.md"


def test_only_runtime_reads_the_environment() -> None:
    reads = re.compile(r"\bos\.(environ|getenv|putenv)\b|from os import .*environ")
    readers = {relative(path) for path in FILES if reads.search(path.read_text(encoding="utf-8"))}
    assert {path for path in readers if not path.startswith("runtime/")} == set()
