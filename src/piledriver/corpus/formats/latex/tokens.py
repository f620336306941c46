"""Split a LaTeX source into tokens and pair opening with closing ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Verbatim text was set aside (see `comments`); its mark is its number between these two characters.
ASIDE_OPEN, ASIDE_CLOSE = "\x02", "\x03"

TOKEN = re.compile(
    r"\\(?:begin|end)[ \t]*\{[^{}\\\n$]{0,60}\}"
    r"|\\[A-Za-z@]+\*?"
    r"|\\\n|\\."
    r"|\$\$?"
    r"|#+[1-9]?"
    r"|[{}\[\]&~]"
    r"|\n[ \t]*\n\s*"
    r"|\n"
    r"|\x02[0-9]+\x03"
    r"|[^\\${}\[\]&~#\n\x02]+"
    r"|.",
)
_SEARCH_DOWN = 64


def tokenize(source: str) -> list[str]:
    r"""Return the tokens: commands, `\begin{x}` and `\end{x}` whole, braces, dollars, paragraph breaks, runs of text.

    >>> tokenize(r"a \b{c}$x$")
    ['a ', '\\b', '{', 'c', '}', '$', 'x', '$']
    """
    return TOKEN.findall(source)


def is_word(token: str) -> bool:
    """Return whether a token is a command made of letters, after which TeX skips white space."""
    return len(token) > 1 and token[0] == "\\" and (token[1].isalpha() or token[1] == "@")


def is_paragraph(token: str) -> bool:
    """Return whether a token is a blank line."""
    return token[0] == "\n" and len(token) > 1


def join_tokens(tokens: Iterable[str]) -> str:
    """Return the source of tokens, with a space between a command and a letter that follows it."""
    out: list[str] = []
    previous_is_word = False
    for token in tokens:
        if previous_is_word and token[0].isalpha():
            out.append(" ")
        out.append(token)
        previous_is_word = is_word(token) and token[-1] != "}" and token[-1] != "*"
    return "".join(out)


def environment(token: str) -> str:
    r"""Return the name in `\begin{name}` or `\end{name}`, or an empty string for another token.

    >>> environment("\\begin {equation*}"), environment("\\beginning")
    ('equation*', '')
    """
    if not token.endswith("}") or not token.startswith(("\\begin", "\\end")):
        return ""
    return token[token.index("{") + 1 : -1].strip()


def pair(tokens: list[str]) -> tuple[list[str], list[int]]:
    r"""Return (tokens, for each the index of the token that closes it, or -1).

    Pairs groups, environments and formulas in one pass with one stack. `$$` inside an inline formula is its end and the
    start of the next (`$a$$b$`), so it becomes two tokens.
    """
    out: list[str] = []
    closing: list[int] = []
    stack: list[tuple[str, int]] = []

    def open_(kind: str) -> None:
        stack.append((kind, len(out) - 1))

    def close(kind: str) -> None:
        for back in range(1, min(len(stack), _SEARCH_DOWN) + 1):
            if stack[-back][0] == kind:
                closing[stack[-back][1]] = len(out) - 1
                del stack[-back:]
                return

    for token in tokens:
        if token == "$$" and stack and stack[-1][0] == "$":
            for half in ("$", "$"):
                out.append(half)
                closing.append(-1)
                if stack and stack[-1][0] == "$":
                    close("$")
                else:
                    open_("$")
            continue
        out.append(token)
        closing.append(-1)
        first = token[0]
        if first == "{":
            open_("{")
        elif first == "}":
            close("{")
        elif first == "$":
            if stack and stack[-1][0] == token:
                close(token)
            else:
                open_(token)
        elif first == "\\":
            if token in ("\\(", "\\["):
                open_(token)
            elif token in ("\\)", "\\]"):
                close("\\(" if token == "\\)" else "\\[")
            elif token.startswith("\\begin") and (name := environment(token)):
                open_(f"\\{name}")
            elif token.startswith("\\end") and (name := environment(token)):
                close(f"\\{name}")
        elif first == "\n" and len(token) > 1 and stack and stack[-1][0] == "$":
            # A blank line ends every paragraph and so every inline formula: the dollar was a plain one.
            stack.pop()
    return out, closing
