"""What an error advises, in words of the command line: what a program would pass as an argument is a verb here."""

from __future__ import annotations

import shlex

from piledriver.core.errors import PiledriverError


def at_the_command_line(error: PiledriverError) -> str:
    """The error's message, with a fix that somebody at a terminal can do.

    >>> from piledriver.core.errors import CorruptFileError
    >>> bad = CorruptFileError("my.jsonl: document 3: no JSON", fix="repair the line, or pass on_bad to skip it")
    >>> print(at_the_command_line(bad).partition("Fix: ")[2])
    repair the line, or keep only the whole ones: piledriver corpus extract jsonl my.jsonl -o whole.jsonl.zst
    """
    if error.fix is None or "on_bad" not in error.fix:
        return str(error)
    shard = shlex.quote(error.what.partition(": document ")[0])
    fix = f"repair the line, or keep only the whole ones: piledriver corpus extract jsonl {shard} -o whole.jsonl.zst"
    return str(PiledriverError(error.what, fix=fix))
