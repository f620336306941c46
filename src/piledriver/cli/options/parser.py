"""Find the verb of a command line, import only its module, and parse its arguments.

A verb is a module with `configure(parser)`, `run(args) -> int | None` and `EXAMPLE`, a command line shown in its help;
`KEYS` names the config class that `--keys` lists. A module with a table `VERBS` of its own is a group of verbs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import ModuleType
from typing import NoReturn

from piledriver.core.errors import nearest

Verbs = Mapping[str, tuple[str, str]]
"""Verb -> (its module, one line of help)."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest flag for an unknown one."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._takes_overrides = False
        self._optional_file: str | None = None
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_overrides(self, help: str, *, optional_file: str | None = None) -> None:
        """Take any number of `key=value`, before, between and after the options.

        `optional_file` names a positional argument before them that may be omitted: a word in its place with a `=` is
        the first override, unless a file of that name exists.

        >>> parser = Parser("train", "")
        >>> _ = parser.add_argument("file", nargs="?"), parser.add_argument("--json", action="store_true")
        >>> parser.add_overrides("change keys", optional_file="file")
        >>> given = parser.parse(["a.yaml", "lr=1", "--json", "seed=2"])
        >>> given.file, given.overrides
        ('a.yaml', ['lr=1', 'seed=2'])
        >>> parser.parse(["lr=1", "--json", "seed=2"]).overrides
        ['lr=1', 'seed=2']
        """
        self.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)
        self._takes_overrides, self._optional_file = True, optional_file

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments of this verb; exit with 2 where they do not fit."""
        parse = self.parse_known_intermixed_args if self._takes_overrides else self.parse_known_args
        found, unknown = parse(arguments)
        if unknown:
            flags = re.findall(r"(?<![\w-])--([\w-]+)", self.format_usage())
            typed = next((word.lstrip("-").partition("=")[0] for word in unknown if word.startswith("--")), "")
            close = nearest(typed, flags)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean --{close}?" if close else ""))
        first = None if self._optional_file is None else getattr(found, self._optional_file)
        if self._optional_file is not None and first is not None and "=" in first and not os.path.exists(first):
            setattr(found, self._optional_file, None)
            found.overrides = [first, *found.overrides]
        return found

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        print(f"{self.prog}: error: {message} (see '{self.prog} --help')", file=sys.stderr)
        raise SystemExit(2)


class _Version(argparse.Action):
    """Print the version. Reading it costs more than the rest of the start-up, so it is read on request only."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from piledriver import __version__

        print(f"piledriver {__version__}")
        parser.exit()


def parse(arguments: Sequence[str], verbs: Verbs, about: str, prog: str = "piledriver") -> argparse.Namespace:
    """Parse a command line; `run_verb` of the result is the function that runs it."""
    flags = list(takewhile(lambda word: word.startswith("-"), arguments))
    group = _group_parser(prog, about, verbs, root=" " not in prog)
    group.parse(flags)
    if len(flags) == len(arguments):
        if flags or " " in prog:
            group.error(f"no command is given, choose from {', '.join(verbs)}")
        return argparse.Namespace(run_verb=lambda _: group.print_help())
    name, *rest = arguments[len(flags) :]
    if name not in verbs:
        close = nearest(name, verbs)
        group.error(f"unknown command {name!r}" + (f", did you mean {close!r}?" if close else ""))
    module_name, help_line = verbs[name]
    module = importlib.import_module(module_name)
    if hasattr(module, "VERBS"):
        return parse(rest, module.VERBS, help_line, f"{prog} {name}")
    if "" in rest and name != "launch":  # an argument of the launched script may be empty
        group.error("an argument is empty; is it a variable that is not set?")
    return _parse_verb(module, rest, f"{prog} {name}", help_line)


def _parse_verb(module: ModuleType, arguments: Sequence[str], prog: str, help_line: str) -> argparse.Namespace:
    parser = Parser(prog, _sentence(help_line), f"example:\n  {module.EXAMPLE}")
    run = module.run
    if hasattr(module, "KEYS"):
        parser.add_argument("--keys", action="store_true", help="list every config key with type, default and help")
    if hasattr(module, "KEYS") and "--keys" in arguments:
        from piledriver.cli.options.keys import run_keys

        parser.add_argument("--json", action="store_true", help="print a JSON list")
        run = run_keys(module.KEYS)
    else:
        module.configure(parser)
    found = parser.parse(arguments)
    found.run_verb = run
    return found


def _group_parser(prog: str, about: str, verbs: Verbs, *, root: bool) -> Parser:
    width = max(map(len, verbs))
    commands = "\n".join(f"  {name:<{width}}  {help_line}" for name, (_, help_line) in verbs.items())
    parser = Parser(prog, _sentence(about), f"commands:\n{commands}")
    parser.usage = f"{prog} [--help] [--debug]{' [--version]' if root else ''} COMMAND ..."
    if root:
        parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return parser


def _sentence(help_line: str) -> str:
    return f"{help_line[0].upper()}{help_line[1:].rstrip('.')}."
