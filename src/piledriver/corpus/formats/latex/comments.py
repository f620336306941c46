"""Remove comments and set verbatim text aside, so that later steps see only what TeX interprets."""

from __future__ import annotations

import re
from collections.abc import Iterable

from piledriver.corpus.formats.latex.tokens import ASIDE_CLOSE, ASIDE_OPEN

_VERBATIM = str.split(
    "verbatim verbatim* Verbatim Verbatim* lstlisting minted alltt code CodeInput CodeOutput CodeChunk Code "
    "BVerbatim LVerbatim SaveVerbatim pyconsole pycode python bashcode terminal spverbatim"
)
_IGNORED = str.split("comment filecontents filecontents* CCSXML")
_INTERESTING = (
    r"\\begin[ \t]*\{(?P<env>%s)\}"
    r"|\\(?P<verb>verb\*?|lstinline(?:\[[^\]\n]*\])?|mintinline(?:\[[^\]\n]*\])?\{[^}\n]*\}|Verb\*?)(?=[^A-Za-z\s*])"
    r"|\\(?:.|\n)"
    r"|(?P<comment>%%[^\n]*(?:\n[ \t]*)?)"
)
_OWN_VERBATIM = re.compile(
    r"\\(?:lstnewenvironment|DefineVerbatimEnvironment|newverbatim|newtcblisting)\s*\{([A-Za-z*]{1,40})\}"
    r"|\\newminted\s*\[([A-Za-z*]{1,40})\]"
    r"|\\newenvironment\s*\{([A-Za-z*]{1,40})\}\s*\{\s*\\VerbatimEnvironment"
)
_OPTIONS = re.compile(r"[ \t]*\[[^\]\n]*\]")
_LANGUAGE = re.compile(r"[ \t]*\{[^}\n]*\}")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")


class Aside:
    """Verbatim pieces by number: a code block ends in a newline, a piece of a line does not.

    `sources` are searched for verbatim environments that the authors define.
    """

    def __init__(self, sources: Iterable[str] = ()) -> None:
        self.pieces: list[str] = []
        own = {name for source in sources for found in _OWN_VERBATIM.findall(source) for name in found if name}
        names = [*_VERBATIM, *_IGNORED, *sorted(own)[:50]]
        self.interesting = re.compile(_INTERESTING % "|".join(re.escape(name) for name in names))

    def put(self, piece: str) -> str:
        """Keep a piece and return the mark that replaces it in the source."""
        self.pieces.append(piece)
        return f"{ASIDE_OPEN}{len(self.pieces) - 1}{ASIDE_CLOSE}"


def without_comments(source: str, aside: Aside) -> str:
    r"""Return the source without comments, with verbatim environments and `\verb` set aside.

    >>> aside = Aside()
    >>> without_comments("50\\% of % half\n  it\\verb|%x|", aside), aside.pieces
    ('50\\% of it\x020\x03', ['%x'])
    """
    source = _CONTROL.sub("", source.replace("\r\n", "\n").replace("\r", "\n"))
    out: list[str] = []
    unclosed: set[str] = set()
    at = 0
    while found := aside.interesting.search(source, at):
        out.append(source[at : found.start()])
        at = found.end()
        if name := found["env"]:
            at = _environment(source, name, at, out, aside, unclosed)
        elif found["verb"]:
            at = _inline(source, at, out, aside)
        elif found["comment"]:
            # TeX reads no line end after a comment, but a blank line after it still ends the paragraph.
            if found["comment"][-1] != "%" and source[at : at + 1] == "\n" and "\n" in found["comment"]:
                out.append("\n")
        else:
            out.append(found[0])
    out.append(source[at:])
    return "".join(out)


def _environment(source: str, name: str, at: int, out: list[str], aside: Aside, unclosed: set[str]) -> int:
    end = source.find(f"\\end{{{name}}}", at) if name not in unclosed else -1
    if end < 0:
        # Search only once: with a million openings the time would be quadratic.
        unclosed.add(name)
        return at
    if name not in _IGNORED:
        start = at
        if found := _OPTIONS.match(source, start):
            start = found.end()
        if name == "minted" and (found := _LANGUAGE.match(source, start)):
            start = found.end()
        body = source[start:end].strip("\n").rstrip()
        out.append(f"\n\n{aside.put(body + chr(10))}\n\n")
    return end + len(f"\\end{{{name}}}")


def _inline(source: str, at: int, out: list[str], aside: Aside) -> int:
    mark = source[at]
    line_end = source.find("\n", at)
    end = source.find({"{": "}"}.get(mark, mark), at + 1, line_end if line_end >= 0 else len(source))
    if end < 0:
        return at
    out.append(aside.put(source[at + 1 : end]))
    return end + 1
