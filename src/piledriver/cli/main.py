"""`piledriver VERB ...`: find the verb, import only that one, run it, turn errors into one line and an exit code.

Exit codes: 0 all is well, 2 wrong usage, 130 interrupted, 143 a launcher that was terminated, 1 anything else.
`--debug` shows the traceback.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from piledriver.core.errors import PiledriverError, nearest

# Verb -> (module with `configure(parser)` and `run(args) -> int | None`, one line of help). A module that holds a
# table VERBS of its own is a group. Nothing here is imported before it is asked for.
VERBS: dict[str, tuple[str, str]] = {
    "env": ("piledriver.cli.env", "versions, devices, what was detected and why"),
    "demo": ("piledriver.cli.demo", "the whole way on this machine's own files: corpus, model, bits per byte"),
    "corpus": ("piledriver.cli.corpus", "raw sources to a clean, attributed corpus"),
    "tokenizer": ("piledriver.cli.tokenizer", "train a tokenizer"),
    "tokenize": ("piledriver.cli.tokenize", "shards of text to shards of tokens"),
    "train": ("piledriver.cli.train", "pretrain a model from token shards"),
    "evaluate": ("piledriver.cli.evaluate", "bits per byte of a model, by source"),
    "trace": ("piledriver.cli.trace", "which documents a training step saw, and which steps saw a document"),
    "launch": ("piledriver.cli.launch", "run a training script on all processes of one or many nodes"),
    "config": ("piledriver.cli.config", "ask a few questions and write the launch config"),
    "test": ("piledriver.cli.test", "check the set-up on all processes"),
    "checkpoint": ("piledriver.cli.checkpoint", "look into, merge and convert checkpoints"),
}


class _Version(argparse.Action):
    """Print the version; reading it costs more than the rest of the start, so it is read only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from piledriver import __version__

        print(f"piledriver {__version__}")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and leave with 2."""
        print(f"{self.prog}: error: {message} (see '{self.prog} --help')", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the `piledriver` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    _write_utf8()
    try:
        code = _run(arguments)
        if sys.stdout is not None:  # as it is where somebody closed it
            sys.stdout.flush()  # here, where what goes wrong can be said in one line
        return code
    except KeyboardInterrupt:
        print(
            "\npiledriver: interrupted; nothing is half-written. Run the same command again to go on.", file=sys.stderr
        )
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader of it (head, less) has left
        return 0
    except BaseException as error:
        # What panics in a library written in Rust is no Exception, so that nobody takes it for one; we end here anyway.
        if debug or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        print(_one_line(error), file=sys.stderr)
        if isinstance(error, OSError) and sys.stdout is not None:
            _drop_output()
        return error.exit_code if isinstance(error, PiledriverError) else 1


def _run(arguments: list[str]) -> int:
    try:
        args = build_parser(arguments).parse_args(arguments)
        return int(args.run_verb(args) or 0)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1 if stop.code else 0


def _drop_output() -> None:
    """Where what was printed has nowhere to go: let it go, or the interpreter complains of it once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # a stream that is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_utf8() -> None:
    """Text of any language goes out whole, whatever the terminal's locale says."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.encoding or "").lower().replace("-", "") != "utf8":
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def build_parser(arguments: Sequence[str]) -> Parser:
    """A parser that knows every verb by name and the arguments of the one that was asked for."""
    parser = Parser(prog="piledriver", description="Raw text to a measured, served language model.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    _add_debug(parser)
    words = [word for word in arguments if not word.startswith("-")]
    _add_verbs(parser, VERBS, words)
    if "" in words and words[0] != "launch":  # whose script may want one
        parser.error("an argument is empty; is it a variable that is not set?")
    return parser


def _add_verbs(parser: Parser, verbs: dict[str, tuple[str, str]], words: list[str]) -> None:
    asked = words[0] if words else None
    if asked is not None and asked not in verbs:
        close = nearest(asked, verbs)
        parser.error(f"unknown command {asked!r}" + (f", did you mean {close!r}?" if close else ""))
    slots = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for name, (module_name, help_line) in verbs.items():
        verb = slots.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        if name != asked:
            continue
        module = importlib.import_module(module_name)
        if hasattr(module, "VERBS"):
            _add_verbs(verb, module.VERBS, words[1:])
        else:
            module.configure(verb)
            _add_debug(verb)
            verb.set_defaults(run_verb=module.run)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno:
        from piledriver.core.storage import explained

        error = explained(error)
    if isinstance(error, PiledriverError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error} (run again with --debug for the traceback)"
    return "piledriver: error: " + " ".join(message.split())


if __name__ == "__main__":
    sys.exit(main())
