"""Expand templates and links in one pass over the brackets, with a stack instead of recursion."""

from __future__ import annotations

import re
from collections.abc import Callable

from piledriver.corpus.formats.wikitext.marks import VANISHED

_TOKENS = re.compile(r"\{\{+|\}\}+|\[\[|\]\]+|\||\n(?=[\n=])")
# Deeper nesting is a mistake; the limit also bounds how often one character is copied.
_MAX_DEPTH = 60

OnParts = Callable[[list[str]], str]


class _Frame:
    """An open `{{` or `[[`: its parts so far, each a list of strings."""

    __slots__ = ("braces", "parts")

    def __init__(self, braces: int, first: list[str]) -> None:
        self.braces = braces
        self.parts = [first]

    def strings(self) -> list[str]:
        return ["".join(part) for part in self.parts]


def expand(text: str, on_template: OnParts, on_link: OnParts) -> str:
    """Return the text with every template and link replaced by what the two functions return for its parts.

    >>> expand("a {{b|[[c|d]]}} e", lambda parts: "<" + "/".join(parts) + ">", lambda parts: parts[-1])
    'a <b/d> e'
    """
    root: list[str] = []
    current = root
    stack: list[_Frame] = []
    at = 0

    def leave(value: str) -> list[str]:
        """Close the innermost frame and append its value to the one around it."""
        stack.pop()
        outer = stack[-1].parts[-1] if stack else root
        outer.append(value)
        return outer

    for token in _TOKENS.finditer(text):
        start = token.start()
        if start > at:
            current.append(text[at:start])
        mark = token.group()
        at = start + len(mark)
        kind = mark[0]
        if kind == "|":
            if stack:
                current = []
                stack[-1].parts.append(current)
            else:
                current.append("|")
        elif kind == "\n":
            # A link never crosses a paragraph, unless it is a picture with a caption.
            while stack and not stack[-1].braces and not _is_picture(stack[-1]):
                current = leave("|".join(stack[-1].strings()))
            current.append("\n")
        elif kind == "[" or kind == "{":
            if len(stack) < _MAX_DEPTH:
                stack.append(_Frame(len(mark) if kind == "{" else 0, []))
                current = stack[-1].parts[0]
        elif kind == "]":
            # A bracket that nothing opened is dropped.
            if stack and not stack[-1].braces:
                if len(mark) > 2 and _has_open_bracket(current):
                    current.append("]")
                current = leave(on_link(stack[-1].strings()))
                if len(mark) >= 4 and stack and not stack[-1].braces:
                    current = leave(on_link(stack[-1].strings()))
        else:
            current = _close_braces(len(mark), stack, root, current, on_template)
    root_tail = current
    root_tail.append(text[at:])
    while stack:
        root_tail = leave("|".join(stack[-1].strings()))
    return "".join(root)


def _close_braces(
    count: int, stack: list[_Frame], root: list[str], current: list[str], on_template: OnParts
) -> list[str]:
    # A link that was not closed before the template around it ends is not a link.
    brace_at = next((i for i in range(len(stack) - 1, -1, -1) if stack[i].braces), None)
    if brace_at is None:
        return current
    while len(stack) - 1 > brace_at:
        value = "|".join(stack.pop().strings())
        stack[-1].parts[-1].append(value)
    while count >= 2 and stack and stack[-1].braces:
        frame = stack.pop()
        taken = 3 if count >= 3 and frame.braces >= 3 else 2
        count -= taken
        strings = frame.strings()
        # Three braces are a parameter of a template, of which a page by itself has only the default.
        value = "".join(strings[1:2]) if taken == 3 else on_template(strings) or VANISHED
        left = frame.braces - taken
        if left >= 2:
            stack.append(_Frame(left, [value]))
        else:
            outer = stack[-1].parts[-1] if stack else root
            outer.append(("{" if left else "") + value)
    return stack[-1].parts[-1] if stack else root


def _is_picture(frame: _Frame) -> bool:
    head = "".join(frame.parts[0])[:80]
    return ":" in head and len(frame.parts) > 1


def _has_open_bracket(chunks: list[str]) -> bool:
    tail = "".join(chunks)
    return tail.rfind("[") > tail.rfind("]")
