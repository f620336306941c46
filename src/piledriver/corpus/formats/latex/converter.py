r"""The walk over the tokens of a LaTeX source that writes its text.

Groups need no recursion (their braces mean nothing in text); arguments and environments recurse over ranges of the same
token list, so every token is read once, to a fixed depth. What single commands and environments write is given to the
`Converter` as two handlers, which call back into it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping

from piledriver.corpus.formats.latex import commands as known
from piledriver.corpus.formats.latex.comments import Aside
from piledriver.corpus.formats.latex.labels import Citations, Labels, reference_mark
from piledriver.corpus.formats.latex.mathematics import display_math, inline_math
from piledriver.corpus.formats.latex.tokens import environment, is_paragraph, is_word, join_tokens

MAX_DEPTH = 50
MAX_OPTIONAL_TOKENS = 400

_LABEL = re.compile(r"[A-Za-z]{1,20}[:_][\w:.+-]{1,80}")
_SPACE = re.compile(r"[ \t\n]+")
_AROUND_BREAK = re.compile("[ \t\n]*\x04[ \t\n\x04]*")
_DIMENSION = re.compile(
    r"\s*=?\s*(?:by\s*)?[-+]?[\d.,]*\s*(?:true\s*)?(?:pt|em|ex|cm|mm|in|bp|pc|dd|cc|sp|mu|fil+)?(?:\s*(?:plus|minus)\s*[-\d.]+\s*\w{2,4})*"
)
Command = Callable[["Converter", int], int]
"""Write the command at a token index and return the index at which to continue."""
Environment = Callable[["Converter", int, str, int], int]
"""Write the environment of a name that opens at a token index, inside a range that ends at another; the same."""


class Converter:
    """The state of one conversion: the blocks written so far, counters and labels, footnotes.

    `tokens` and `closing` are what `tokens.pair` returns. `commands` maps commands to their handlers, `environment`
    handles all environments.
    """

    def __init__(
        self,
        tokens: list[str],
        closing: list[int],
        aside: Aside,
        *,
        commands: Mapping[str, Command],
        environment: Environment,
    ) -> None:
        self.tokens, self.closing, self.aside = tokens, closing, aside
        self._commands, self._environment = commands, environment
        self.labels, self.citations = Labels(), Citations()
        self.blocks: list[str] = []
        self.inline: list[str] = []
        self.notes: list[str] = []
        self.title = ""
        self.theorems: dict[str, tuple[str, str, bool]] = {}
        # Positions of AMS-TeX's closing commands and of paragraph breaks.
        self._ends: dict[str, list[int]] = {}
        for index, token in enumerate(tokens):
            if token.startswith("\\end") and token[-1] != "}":
                self._ends.setdefault(token, []).append(index)
            elif is_paragraph(token):
                self._ends.setdefault("paragraph", []).append(index)
        self._depth = 0
        self.float_name = ""
        self.literal = False
        self.in_algorithm = False

    # Ranges of tokens

    def skip_space(self, index: int) -> int:
        """Return the index of the first token from `index` on that is not white space."""
        tokens = self.tokens
        while (
            index < len(tokens)
            and (tokens[index] == "\n" or tokens[index].isspace())
            and not is_paragraph(tokens[index])
        ):
            index += 1
        return index

    def argument(self, index: int) -> tuple[int, tuple[int, int]]:
        """Return (the index after it, the range) of the argument at `index`: a group, or one token."""
        index = self.skip_space(index)
        if index >= len(self.tokens):
            return index, (index, index)
        token = self.tokens[index]
        if token == "{":
            close = self.closing[index]
            return (close + 1, (index + 1, close)) if close >= 0 else (index + 1, (index, index))
        if token == "}" or is_paragraph(token) or environment(token):
            return index, (index, index)
        return index + 1, (index, index + 1)

    def delimited(self, index: int) -> tuple[int, tuple[int, int]]:
        r"""Return (the index after it, the range) of the argument of the command at `index`.

        That is a group or, in AMS-TeX, the tokens before the `\end...` of the command; for `\beginsection` of plain TeX
        the rest of the paragraph.
        """
        after, _ = self.optional(index + 1)
        if self.braced(after):
            return self.argument(after)
        name = self.tokens[index].rstrip("*")
        places = self._ends.get("paragraph" if name == "\\beginsection" else f"\\end{name[1:]}", [])
        found = bisect_left(places, after)
        if found < len(places) and places[found] - after < MAX_OPTIONAL_TOKENS:
            return places[found] + 1, (after, places[found])
        return self.argument(after) if name in known.SECTIONS else (after, (after, after))

    def braced(self, index: int) -> bool:
        """Return whether a group follows."""
        index = self.skip_space(index)
        return index < len(self.tokens) and self.tokens[index] == "{"

    def optional(self, index: int) -> tuple[int, tuple[int, int] | None]:
        """Return (the index after it, the range in brackets); `index` and `None` where no brackets follow."""
        start = self.skip_space(index)
        if start >= len(self.tokens) or self.tokens[start] != "[":
            return index, None
        depth = 0
        at = start
        limit = min(len(self.tokens), start + MAX_OPTIONAL_TOKENS)
        while at < limit:
            token = self.tokens[at]
            if token == "[":
                depth += 1
            elif token == "]":
                depth -= 1
                if depth == 0:
                    return at + 1, (start + 1, at)
            elif token == "}" or is_paragraph(token):
                break
            elif self.closing[at] > at:
                at = self.closing[at]
            at += 1
        return index, None

    def after_arguments(self, index: int, count: int) -> int:
        """Return the index after up to `count` groups, each with its options."""
        index, _ = self.optional(index)
        for _ in range(count):
            index, _ = self.optional(index)
            if not self.braced(index):
                break
            index, _ = self.argument(index)
        return index

    def raw(self, start: int, end: int) -> str:
        """Return the source of a range."""
        return join_tokens(self.tokens[start:end])

    def text(self, start: int, end: int) -> str:
        """Return the text of a range on one line."""
        return _one_line(self.sub(start, end))

    def sub(self, start: int, end: int) -> str:
        """Return the text of a range, its blocks separated by blank lines."""
        if self._depth >= MAX_DEPTH:
            return "".join(token for token in self.tokens[start:end] if token[0] not in "\\{}$&#[]\x02")
        outer = self.blocks, self.inline
        self.blocks, self.inline = [], []
        self._depth += 1
        try:
            self.render(start, end)
            self.flush()
            return "\n\n".join(self.blocks)
        finally:
            self.blocks, self.inline = outer
            self._depth -= 1

    # Writing

    def flush(self) -> None:
        """End the paragraph."""
        if self.inline:
            paragraph = _paragraph("".join(self.inline))
            self.inline.clear()
            if paragraph:
                self.blocks.append(paragraph)

    def block(self, text: str) -> None:
        """End the paragraph and add a block."""
        self.flush()
        if text.strip():
            self.blocks.append(text)

    def render(self, start: int, end: int) -> None:
        """Write the text of a range."""
        tokens, inline = self.tokens, self.inline
        index = start
        while index < end:
            token = tokens[index]
            first = token[0]
            if first == "\\":
                index = self.command(index, end)
                inline = self.inline
            elif first == "$":
                index = self._dollar(index)
            elif first == "\n" and len(token) > 1:
                self.flush()
                index += 1
            elif first == "{" or first == "}" or first == "&" or first == "#":
                if first == "&":
                    inline.append(" ")
                index += 1
            elif first == "~":
                inline.append(" ")
                index += 1
            elif first == "\x02":
                self._verbatim(token)
                index += 1
            else:
                inline.append(token if self.literal else _typeset(token))
                index += 1

    def _verbatim(self, token: str) -> None:
        piece = self.aside.pieces[int(token[1:-1])]
        if piece.endswith("\n"):
            self.block(f"```\n{piece}```")
        else:
            self.inline.append(f"`{piece}`")

    def _dollar(self, index: int) -> int:
        close = self.closing[index]
        if close < 0:
            self.inline.append("$" if self.tokens[index] == "$" else "")
            return index + 1
        body = self.tokens[index + 1 : close]
        if self.tokens[index] == "$$":
            self.block(display_math(body, "", False, self.labels))
        else:
            self.inline.append(inline_math(body))
        return close + 1

    def command(self, index: int, end: int) -> int:
        """Write the command at `index`; return the index at which to continue."""
        token = self.tokens[index]
        if token.startswith(("\\begin", "\\end")) and (name := environment(token)):
            return self._environment(self, index, name, end) if token.startswith("\\begin") else index + 1
        handler = self._commands.get(token)
        if handler is not None:
            return min(handler(self, index), max(end, index + 1))
        if self.in_algorithm and (action := known.ALGORITHM.get(token[1:].lower())) is not None:
            return self._pseudo_code(index, action)
        symbol = known.SYMBOLS.get(token)
        if symbol is not None:
            self.inline.append(symbol)
            return self.after_word(index) if is_word(token) else index + 1
        if token in known.ACCENTS:
            after, base = self.argument(index + 1)
            return self._accent(token, after, base)
        if token in known.DROPPED_ARGUMENTS:
            return self._drop(index, known.DROPPED_ARGUMENTS[token])
        if token in known.DIMENSIONS:
            return self._dimension(index)
        if not is_word(token):
            return index + 1
        # Unknown: its options are for the typesetter, its arguments are probably text, or the label of a reference.
        after, _ = self.optional(index + 1)
        if self.braced(after):
            end, (start, stop) = self.argument(after)
            if stop - start == 1 and _LABEL.fullmatch(label := self.tokens[start].strip()):
                self.inline.append(reference_mark(label, "perhaps"))
                return end
        return after if after > index + 1 else self.after_word(index)

    def after_word(self, index: int) -> int:
        """Return the index after a command word and the white space that TeX skips behind it."""
        following = index + 1
        if following < len(self.tokens):
            token = self.tokens[following]
            if token == "\n":
                return following + 1
            if token[0] in " \t":
                self.tokens[following] = token.lstrip(" \t") or " "
                return following if token.strip() else following + 1
        return following

    def _accent(self, command: str, after: int, base: tuple[int, int]) -> int:
        start, end = base
        if end - start == 1 and self.tokens[start][0] not in "\\{}$\x02" and self.tokens[start - 1] != "{":
            token = self.tokens[start].lstrip()
            self.inline.append(known.accented(command, token[:1]) + _typeset(token[1:]))
            return after
        self.inline.append(known.accented(command, self.text(start, end)))
        return after

    def _drop(self, index: int, arguments: int) -> int:
        after, _ = self.optional(index + 1)
        return self.after_arguments(after, arguments) if self.braced(after) else max(after, self.delimited(index)[0])

    def _dimension(self, index: int) -> int:
        following = self.skip_space(index + 1)
        if following < len(self.tokens) and self.tokens[following][0] not in "\\{}$&#[]~\x02\n":
            token = self.tokens[following]
            found = _DIMENSION.match(token)
            rest = token[found.end() :] if found else token
            self.tokens[following] = rest or " "
        return following

    def _pseudo_code(self, index: int, action: tuple[str, str | None]) -> int:
        before, behind = action
        self.inline.append(before)
        after, _ = self.optional(index + 1)
        if behind is not None and self.braced(after):
            after, argument = self.argument(after)
            self.inline.append(self.text(*argument) + behind)
            if behind and self.braced(after):
                # algorithm2e: the body follows as an argument.
                self.inline.append(known.LINE_BREAK)
        return after


def _typeset(text: str) -> str:
    """Return text with TeX's ligatures for dashes and quotation marks replaced."""
    if "-" in text and "--" in text:
        text = text.replace("---", "—").replace("--", "–")
    if "`" in text:
        text = text.replace("``", "“").replace("`", "‘")
    if "'" in text:
        text = text.replace("''", "”").replace("'", "’")
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _paragraph(text: str) -> str:
    text = _SPACE.sub(" ", text)
    if known.LINE_BREAK in text:
        text = _AROUND_BREAK.sub("\n", text)
    return text.strip(" \n")
