"""`piledriver VERB ...`: parse the command line, run the verb, turn errors into one line and an exit code.

Exit codes: 0 success; 2 wrong usage; 75 a training run that was asked to stop and can be resumed; 130 interrupted; 143
terminated launcher; 1 any other error. `--debug` shows the traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

from piledriver.cli.options.parser import Verbs, parse
from piledriver.core.errors import PiledriverError

# Nothing here is imported before it is asked for.
VERBS: Verbs = {
    "env": ("piledriver.cli.env", "print versions, devices, and what was detected and why"),
    "demo": ("piledriver.cli.demo", "run the whole pipeline on this machine's own files: corpus, model, bits per byte"),
    "corpus": ("piledriver.cli.corpus", "build a clean, attributed corpus from raw sources"),
    "tokenizer": ("piledriver.cli.tokenizer", "train a tokenizer"),
    "tokenize": ("piledriver.cli.tokenize", "convert text shards to token shards"),
    "presets": ("piledriver.cli.presets", "list the model shapes that a config can name"),
    "plan": ("piledriver.cli.plan", "predict memory and time of a model on hardware, and choose its layout"),
    "estimate-memory": ("piledriver.cli.estimate_memory", "bytes of a model by dtype, with Accelerate's arguments"),
    "train": ("piledriver.cli.train", "pretrain a model, or resume a run"),
    "profile": ("piledriver.cli.profile", "show where time and memory of training steps go, with advice"),
    "evaluate": ("piledriver.cli.evaluate", "measure a model: bits per byte by source, or tasks"),
    "generate": ("piledriver.cli.generate", "continue prompts with a model"),
    "run": ("piledriver.cli.run", "answer a prompt with a model that may be larger than memory"),
    "compress": ("piledriver.cli.compress", "make a model smaller: quantise or prune it"),
    "serve": ("piledriver.cli.serve", "serve a model: OpenAI-compatible API and a page for the browser"),
    "bench": ("piledriver.cli.bench", "measure a running server"),
    "watch": ("piledriver.cli.watch", "open a local page for live and finished runs"),
    "trace": ("piledriver.cli.trace", "list the documents that a training step saw, or the steps that saw a document"),
    "launch": ("piledriver.cli.launch", "start a script on all processes of one or more nodes"),
    "config": ("piledriver.cli.config", "write the config of 'piledriver launch', by questions or --default"),
    "test": ("piledriver.cli.test", "check the processes that 'piledriver launch' starts"),
    "checkpoint": ("piledriver.cli.checkpoint", "inspect, merge and convert checkpoints"),
}
_ABOUT = "raw text to a measured language model"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: the entry point of the `piledriver` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    _write_utf8()
    # On a CPU without bf16 instructions torch says so with a stack trace; its other path gives the same numbers.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    try:
        code = _run(arguments)
        if sys.stdout is not None:  # closed by the parent process
            sys.stdout.flush()  # here, so that a failure is reported in one line
        return code
    except KeyboardInterrupt:
        print(
            "\npiledriver: interrupted; no file is half-written. Run the same command again to resume.", file=sys.stderr
        )
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader of the pipe (head, less) has closed it
        return 0
    except BaseException as error:
        # Panics of libraries written in Rust derive from BaseException; report them like errors.
        if debug or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        print(_one_line(error), file=sys.stderr)
        if isinstance(error, OSError) and sys.stdout is not None:
            _drop_output()
        return error.exit_code if isinstance(error, PiledriverError) else 1


def parse_command(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line without running it; `run_verb` of the result runs it."""
    return parse(arguments, VERBS, _ABOUT)


def _run(arguments: list[str]) -> int:
    try:
        args = parse_command(arguments)
        return int(args.run_verb(args) or 0)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1 if stop.code else 0


def _drop_output() -> None:
    """Discard output that cannot be written, or the interpreter reports it once more when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # a stream without a file descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_utf8() -> None:
    """Write UTF-8 whatever the locale is, so that text of any language can be printed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.encoding or "").lower().replace("-", "") != "utf8":
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


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
