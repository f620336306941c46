r"""Write formulas as LaTeX: `$...$` in a line, `$$...$$` as a block, without commands for numbers and spacing."""

from __future__ import annotations

from piledriver.corpus.formats.latex.commands import DROPPED_ENVIRONMENTS
from piledriver.corpus.formats.latex.labels import Labels
from piledriver.corpus.formats.latex.tokens import ASIDE_OPEN, environment, join_tokens

_DROPPED = frozenset(
    str.split(
        "\\nonumber \\notag \\ensuremath \\xspace \\displaystyle \\allowbreak \\nolimits \\noindent \\hfill "
        "\\smallskip \\medskip \\bigskip \\textstyle \\protect \\relax \\unskip \\par"
    )
)
_WITH_ARGUMENT = frozenset(("\\color", "\\includegraphics", "\\vspace", "\\vspace*", "\\hspace", "\\hspace*"))


def inline_math(tokens: list[str]) -> str:
    """Return a formula in a line, or an empty string where it is empty."""
    body = " ".join(join_tokens(_readable(tokens)).split())
    return f"${body}$" if body else ""


def display_math(tokens: list[str], inner: str, numbered: bool, labels: Labels) -> str:
    r"""Return a formula as a block; a labelled equation shows the number that references to it print.

    >>> print(display_math(["a=b", "\\label", "{", "eq:x", "}"], "", True, Labels()))
    $$a=b \tag{1}$$
    """
    rows = _rows(tokens) if inner == "aligned" or any(token == "\\label" for token in tokens) else [tokens]
    # A multline or a single equation has one number for all its rows.
    whole = inner != "aligned"
    parts = []
    number = ""
    for row in rows:
        silent = any(token in ("\\nonumber", "\\notag") for token in row)
        tagged = any(token.startswith("\\tag") for token in row)
        empty = not any(token.strip() for token in row)
        if numbered and not silent and not tagged and not empty and not (whole and number):
            number = labels.equation()
        row, own_labels = _without_labels(row)
        for label in own_labels:
            if number:
                labels.set(label)
        body = " ".join(join_tokens(_readable(row)).split())
        if own_labels and number and not tagged:
            body = f"{body} \\tag{{{number}}}"
        parts.append(body)
    while parts and not parts[-1]:
        parts.pop()
    body = " \\\\ ".join(parts).strip()
    if not body:
        return ""
    if inner and ("&" in body or "\\\\" in body):
        body = f"\\begin{{{inner}}} {body} \\end{{{inner}}}"
    return f"$${body}$$"


def _readable(tokens: list[str]) -> list[str]:
    """Return the tokens without those that place, colour or draw; a blank line in a formula becomes a space."""
    out: list[str] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if token[0] == "\n":
            out.append(" ")
        elif token in _WITH_ARGUMENT:
            index = _after_group(tokens, index)
        elif token.startswith("\\begin") and environment(token) in DROPPED_ENVIRONMENTS:
            end = token.replace("\\begin", "\\end", 1)
            while index < len(tokens) and tokens[index] != end:
                index += 1
            index += 1
        elif token not in _DROPPED and token[0] != ASIDE_OPEN:
            out.append(token)
    return out


def _after_group(tokens: list[str], index: int) -> int:
    """Return the index after the options and the group at `index`."""
    for opening, closing in (("[", "]"), ("{", "}")):
        if index < len(tokens) and tokens[index] == opening:
            depth = 0
            while index < len(tokens):
                depth += (tokens[index] == opening) - (tokens[index] == closing)
                index += 1
                if depth == 0:
                    break
    return index


def _rows(tokens: list[str]) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        if token == "{" or (token.startswith("\\begin") and environment(token)):
            depth += 1
        elif token == "}" or (token.startswith("\\end") and environment(token)):
            depth -= 1
        if depth == 0 and token in ("\\\\", "\\cr", "\\\\*"):
            rows.append([])
        else:
            rows[-1].append(token)
    return rows


def _without_labels(tokens: list[str]) -> tuple[list[str], list[str]]:
    out: list[str] = []
    labels: list[str] = []
    index = 0
    while index < len(tokens):
        if tokens[index] == "\\label" and index + 1 < len(tokens) and tokens[index + 1] == "{":
            end = index + 2
            while end < len(tokens) and tokens[end] != "}":
                end += 1
            labels.append("".join(tokens[index + 2 : end]).strip())
            index = end + 1
        else:
            out.append(tokens[index])
            index += 1
    return out, labels
