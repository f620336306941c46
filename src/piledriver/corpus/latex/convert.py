r"""The text of a LaTeX source: headings, paragraphs, lists, tables, captions, theorems, formulas, notes, references.

One walk over paired tokens. Groups need no recursion (their braces mean nothing in text); arguments and environments
recurse over ranges of the same token list, so every token is read once, to a fixed depth.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable

from piledriver.corpus.latex import commands as known
from piledriver.corpus.latex.comments import Aside
from piledriver.corpus.latex.labels import Citations, Labels, place, resolved
from piledriver.corpus.latex.macros import expanded
from piledriver.corpus.latex.mathematics import display_math, inline_math
from piledriver.corpus.latex.symbols import ACCENTS, SYMBOLS, UNITS, accented
from piledriver.corpus.latex.tables import table_text
from piledriver.corpus.latex.tokens import environment, is_paragraph, is_word, joined, pair, tokenize
from piledriver.corpus.markdown import heading, indented, lowered, raised

MAX_DEPTH = 50
MAX_OPTIONAL_TOKENS = 400

_SPACE = re.compile(r"[ \t\n]+")
_AROUND_BREAK = re.compile("[ \t\n]*\x04[ \t\n\x04]*")
_DIMENSION = re.compile(
    r"\s*=?\s*(?:by\s*)?[-+]?[\d.,]*\s*(?:true\s*)?(?:pt|em|ex|cm|mm|in|bp|pc|dd|cc|sp|mu|fil+)?(?:\s*(?:plus|minus)\s*[-\d.]+\s*\w{2,4})*"
)
_NUMBER_WITHIN = re.compile(
    r"\\numberwithin\s*\{equation\}\s*\{section\}|\\def\\theequation\{\\thesection|\\theequation\}?\s*\{\\thesection|"
    r"\\@addtoreset\{equation\}\{section\}"
)


def to_text(source: str, aside: Aside) -> str:
    r"""Readable text of a source that `gathered` made.

    >>> to_text(r"\section{One}Let $x>0$.\begin{itemize}\item a\item b\end{itemize}", Aside())
    '## One\n\nLet $x>0$.\n\n- a\n- b'
    """
    tokens, closing = pair(expanded(tokenize(source)))
    converter = Converter(tokens, closing, aside)
    converter.labels.equations_within_sections = _NUMBER_WITHIN.search(source) is not None
    if re.search(r"\\document(?:class|style)[^{]{0,200}\{[^}]{0,200}(revtex|aps)", source):
        converter.labels.style = "revtex"
    elif re.search(r"\\documentclass[^{]{0,200}\{[^}]{0,200}IEEE", source):
        converter.labels.style = "ieee"
    if re.search(r"\\usepackage[^{]{0,200}\{[^}]{0,200}(?:acl|naacl|emnlp|coling)", source):
        converter.citations.plain_cite = "citep"
    return converter.document()


class Converter:
    """The state of one conversion: where blocks go, what was numbered, which notes were found."""

    def __init__(self, tokens: list[str], closing: list[int], aside: Aside) -> None:
        self.tokens, self.closing, self.aside = tokens, closing, aside
        self.labels, self.citations = Labels(), Citations()
        self.blocks: list[str] = []
        self.inline: list[str] = []
        self.notes: list[str] = []
        self.title = ""
        self.theorems: dict[str, tuple[str, str, bool]] = {}
        # Where AMS-TeX's closing commands and the paragraph breaks stand.
        self._ends: dict[str, list[int]] = {}
        for index, token in enumerate(tokens):
            if token.startswith("\\end") and token[-1] != "}":
                self._ends.setdefault(token, []).append(index)
            elif is_paragraph(token):
                self._ends.setdefault("paragraph", []).append(index)
        self._depth = 0
        self._float = ""
        self._literal = False
        self._algorithm = False

    def document(self) -> str:
        start, end = self._body()
        self._preamble(start)
        self._bibliography(start)
        self.render(start, end)
        self.flush()
        blocks = self.blocks
        if self.title:
            blocks.insert(0, heading(self.title, 1))
        blocks.extend(f"[^{number}]: {note}" for number, note in enumerate(self.notes, 1))
        return resolved("\n\n".join(blocks), self.labels)

    def _body(self) -> tuple[int, int]:
        for index, token in enumerate(self.tokens):
            if token.startswith("\\begin") and environment(token) == "document":
                end = self.closing[index]
                return index + 1, end if end >= 0 else len(self.tokens)
        return 0, len(self.tokens)

    def _preamble(self, end: int) -> None:
        """What a preamble says that is text or names something: title, abstract, theorems."""
        index = 0
        while index < end:
            token = self.tokens[index]
            if token in ("\\title", "\\newtheorem", "\\newtheorem*", "\\abstract", "\\icmltitle", "\\spnewtheorem") or (
                environment(token) == "abstract" and token.startswith("\\begin") and self.closing[index] > 0
            ):
                index = self.command(index, end)
            else:
                index += 1
        self.flush()

    def _bibliography(self, start: int) -> None:
        """The keys of the list at the end, before the text that cites them."""
        for index in range(start, len(self.tokens)):
            if self.tokens[index] == "\\bibitem":
                after, label = self.optional(index + 1)
                after, key = self.argument(after)
                self.citations.add(self.raw(*key).strip(), self.text(*label)[:500] if label else "")

    # Ranges of tokens

    def skip_space(self, index: int) -> int:
        tokens = self.tokens
        while (
            index < len(tokens)
            and (tokens[index] == "\n" or tokens[index].isspace())
            and not is_paragraph(tokens[index])
        ):
            index += 1
        return index

    def argument(self, index: int) -> tuple[int, tuple[int, int]]:
        """(where to go on, the range of the argument): a group, or one token."""
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
        r"""The argument of the command at `index`: a group, or in AMS-TeX what stands before its `\\end...` command.

        `\\beginsection` of plain TeX goes to the end of the paragraph.
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
        index = self.skip_space(index)
        return index < len(self.tokens) and self.tokens[index] == "{"

    def optional(self, index: int) -> tuple[int, tuple[int, int] | None]:
        """(where to go on, the range in brackets or None)."""
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

    def raw(self, start: int, end: int) -> str:
        """The source of a range."""
        return joined(self.tokens[start:end])

    def text(self, start: int, end: int) -> str:
        """A range as text on one line."""
        return _one_line(self.sub(start, end))

    def sub(self, start: int, end: int) -> str:
        """A range as text of its own: its blocks, apart."""
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
        """A block of its own."""
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
                inline.append(token if self._literal else _typeset(token))
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
        """Write what the command at `index` stands for; where to go on."""
        token = self.tokens[index]
        if token.startswith(("\\begin", "\\end")) and (name := environment(token)):
            return self._environment(index, name, end) if token.startswith("\\begin") else index + 1
        special = SPECIAL.get(token)
        if special is not None:
            return min(special(self, index), max(end, index + 1))
        if self._algorithm and (action := known.ALGORITHM.get(token[1:].lower())) is not None:
            return self._pseudo_code(index, action)
        symbol = SYMBOLS.get(token)
        if symbol is not None:
            self.inline.append(symbol)
            return self._after_word(index) if is_word(token) else index + 1
        if token in ACCENTS:
            after, base = self.argument(index + 1)
            return self._accent(token, after, base)
        plain = token.rstrip("*")
        if plain in known.SECTIONS:
            return self._section(index, plain, token)
        if token in known.CITATIONS:
            return self._cite(index)
        if token in known.REFERENCES:
            return self._reference(index)
        if token in known.DROPPED_ARGUMENTS:
            return self._drop(index, known.DROPPED_ARGUMENTS[token])
        if token in known.DIMENSIONS:
            return self._dimension(index)
        if not is_word(token):
            return index + 1
        # Unknown: its options are for the typesetter, its arguments are probably text.
        after, _ = self.optional(index + 1)
        return after if after > index + 1 else self._after_word(index)

    def _after_word(self, index: int) -> int:
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
            self.inline.append(accented(command, token[:1]) + _typeset(token[1:]))
            return after
        self.inline.append(accented(command, self.text(start, end)))
        return after

    def _drop(self, index: int, arguments: int) -> int:
        after, _ = self.optional(index + 1)
        if not self.braced(after):
            return max(after, self.delimited(index)[0])
        for _ in range(arguments):
            after, _ = self.optional(after)
            if not self.braced(after):
                break
            after, _ = self.argument(after)
        return after

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
                self.inline.append("\x04")
        return after

    # Commands

    def _section(self, index: int, plain: str, token: str) -> int:
        after, title = self.delimited(index)
        level = known.SECTIONS[plain]
        if level == 0:
            self.inline.append(self.raw(*title))
            return after
        self.flush()
        if not token.endswith("*"):
            self.labels.section(level)
        if text := self.text(*title):
            self.blocks.append(heading(text, level))
        return after

    def _title(self, index: int) -> int:
        after, title = self.delimited(index)
        if text := self.text(*title).replace("\n", " "):
            self.title = text
        return after

    def _abstract(self, index: int) -> int:
        after, body = self.delimited(index)
        if text := self.sub(*body):
            self.block(heading("Abstract", 2))
            self.block(text)
        return after

    def _proclaim(self, index: int) -> int:
        """AMS-TeX: a theorem or a proof with its name."""
        after, name = self.argument(index + 1)
        self.flush()
        if text := self.text(*name):
            self.inline.append(f"{text.rstrip('.')}. ")
        return after

    def _keywords(self, index: int) -> int:
        after, words = self.argument(index + 1)
        if text := self.text(*words):
            self.block(f"Keywords: {text}")
        return after

    def _caption(self, index: int) -> int:
        after, _ = self.optional(index + 1)
        if self.tokens[index] == "\\captionof":
            after, kind = self.argument(after)
            self._float = self.raw(*kind).strip().capitalize() or self._float
            after, _ = self.optional(after)
        after, caption = self.argument(after)
        name = self._float or "Figure"
        number = self.labels.number(name, name)
        text = self.sub(*caption)
        self.block(f"{name} {number}: {text}" if text else f"{name} {number}")
        return after

    def _plain_caption(self, index: int) -> int:
        """A caption without a number: of a part of a figure, it stands in brackets before what it describes."""
        after, caption = self.optional(index + 1)
        after, _ = self.optional(after)
        if caption is not None:
            self.block(self.sub(*caption))
        after, body = self.argument(after)
        self.block(self.sub(*body))
        return after

    def _in_one_column(self, index: int) -> int:
        r"""`\\twocolumn[...]`: what stands in the brackets is the head of the paper."""
        start = self.skip_space(index + 1)
        if start >= len(self.tokens) or self.tokens[start] != "[":
            return index + 1
        at = start + 1
        while at < len(self.tokens) and self.tokens[at] != "]":
            at = self.closing[at] + 1 if self.closing[at] > at else at + 1
        self.render(start + 1, at)
        self.flush()
        return at + 1

    def _thanks(self, index: int) -> int:
        self.block(heading("Acknowledgments", 2))
        return self._after_word(index)

    def _spanning_rows(self, index: int) -> int:
        after, _ = self.optional(index + 1)
        after, _ = self.argument(after)
        after, _ = self.optional(after)
        after = self.skip_space(after)
        if after < len(self.tokens) and self.tokens[after].lstrip().startswith("*"):
            # The width of \multirow, without its braces.
            self.tokens[after] = self.tokens[after].lstrip()[1:] or " "
            return after
        after, _ = self.argument(after)
        return after

    def _footnote(self, index: int) -> int:
        after, _ = self.optional(index + 1)
        after, note = self.argument(after)
        number = len(self.notes)
        self.notes.append("")
        self.notes[number] = self.text(*note)
        if self.notes[number]:
            while self.inline and self.inline[-1].isspace():
                self.inline.pop()
            if self.tokens[index] != "\\footnotetext":
                self.inline.append(f"[^{number + 1}]")
        else:
            del self.notes[number:]
        return after

    def _label(self, index: int) -> int:
        after, name = self.argument(index + 1)
        self.labels.set(self.raw(*name).strip())
        return after

    def _reference(self, index: int) -> int:
        token = self.tokens[index].lstrip("\\").rstrip("*")
        after, _ = self.optional(index + 1)
        after, name = self.argument(after)
        style = (
            "equation" if token in ("eqref", "Eqref") else "named" if token in ("autoref", "cref", "Cref") else "number"
        )
        self.inline.append(place(self.raw(*name).strip(), style))
        return after

    def _cite(self, index: int) -> int:
        after, first = self.optional(index + 1)
        after, second = self.optional(after)
        if not self.braced(after):
            return after
        after, names = self.argument(after)
        keys = [key.strip() for key in self.raw(*names).split(",") if key.strip()]
        before = self.text(*first) if first and second else ""
        behind = self.text(*second) if second else self.text(*first) if first else ""
        self.inline.append(self.citations.cite(self.tokens[index], keys, before, behind))
        return after

    def _bibitem(self, index: int) -> int:
        after, _label = self.optional(index + 1)
        after, key = self.argument(after)
        self.flush()
        name = self.raw(*key).strip()
        if name not in self.citations.authors:
            self.inline.append(f"[{self.citations.numbers.get(name, name)}] ")
        return after

    def _link(self, index: int) -> int:
        after, _ = self.optional(index + 1)
        after, url = self.argument(after)
        if not self.braced(after):
            self.inline.append(self._url_text(url))
            return after
        after, text = self.argument(after)
        shown = self.text(*text)
        self.inline.append(shown or self._url_text(url))
        return after

    def _url(self, index: int) -> int:
        after, url = self.argument(index + 1)
        self.inline.append(self._url_text(url))
        return after

    def _url_text(self, url: tuple[int, int]) -> str:
        return self.raw(*url).replace("\\", "").strip()

    def _math(self, index: int) -> int:
        close = self.closing[index]
        if close < 0:
            return index + 1
        body = self.tokens[index + 1 : close]
        if self.tokens[index] == "\\(":
            self.inline.append(inline_math(body))
        else:
            self.block(display_math(body, "", False, self.labels))
        return close + 1

    def _ensure_math(self, index: int) -> int:
        after, body = self.argument(index + 1)
        self.inline.append(inline_math(self.tokens[slice(*body)]))
        return after

    def _script(self, index: int) -> int:
        after, body = self.argument(index + 1)
        text = self.text(*body)
        self.inline.append(raised(text) if "super" in self.tokens[index] else lowered(text))
        return after

    def _literal_text(self, index: int) -> int:
        after, body = self.argument(index + 1)
        outer, self._literal = self._literal, True
        self.inline.append(self.sub(*body))
        self._literal = outer
        return after

    def _quoted(self, index: int) -> int:
        after, body = self.argument(index + 1)
        self.inline.append(f"“{self.text(*body)}”")
        return after

    def _second_argument(self, index: int) -> int:
        after, _ = self.optional(index + 1)
        after, _ = self.argument(after)
        after, _ = self.optional(after)
        return after

    def _first_argument(self, index: int) -> int:
        after, body = self.argument(index + 1)
        self.inline.append(self.sub(*body))
        after, _ = self.argument(after)
        return after

    def _space_if_word(self, index: int) -> int:
        following = self.tokens[index + 1] if index + 1 < len(self.tokens) else " "
        if following[0].isalnum() or (
            following[0] in "($\\" and not following.startswith(("\\'", "\\@", "\\/", "\\,"))
        ):
            self.inline.append(" ")
        return index + 1

    def _quantity(self, index: int) -> int:
        after, _ = self.optional(index + 1)
        after, number = self.argument(after)
        parts = [_number(self.raw(*number))] if self.tokens[index][1:] != "si" else []
        if self.tokens[index] in ("\\si", "\\unit"):
            parts = [self._unit(number)]
        elif self.tokens[index] in ("\\SI", "\\qty", "\\SIrange", "\\qtyrange"):
            if "range" in self.tokens[index]:
                after, number = self.argument(after)
                parts.append(f"to {_number(self.raw(*number))}")
            after, unit = self.argument(after)
            parts.append(self._unit(unit))
        self.inline.append(" ".join(filter(None, parts)))
        return after

    def _unit(self, unit: tuple[int, int]) -> str:
        out = ""
        for token in self.tokens[slice(*unit)]:
            out += UNITS.get(token[1:], token[1:]) if token[0] == "\\" else token.strip("{} ").replace("~", " ")
        return out

    def _new_theorem(self, index: int) -> int:
        after, name = self.argument(index + 1)
        after, shared = self.optional(after)
        after, title = self.argument(after)
        after, within = self.optional(after)
        key = self.raw(*name).strip()
        counter, in_section = key, bool(within and "section" in self.raw(*within))
        if shared:
            counter = self.raw(*shared).strip()
            in_section = self.theorems.get(counter, ("", "", False))[2]
            counter = self.theorems.get(counter, ("", counter, False))[1]
        numbered = self.tokens[index] != "\\newtheorem*"
        self.theorems[key] = (self.text(*title), counter if numbered else "", in_section)
        return after

    def _appendix(self, index: int) -> int:
        self.labels.appendix()
        return index + 1

    def _line_break(self, index: int) -> int:
        self.inline.append("\x04")
        after, _ = self.optional(index + 1)
        return after

    def _end_paragraph(self, index: int) -> int:
        self.flush()
        return self._after_word(index)

    def _new_block(self, index: int) -> int:
        self.inline.append(" ")
        return self._after_word(index)

    def _algorithm_line(self, index: int) -> int:
        self.inline.append("\x04" if self._algorithm else " ")
        return index + 1

    # Environments

    def _environment(self, index: int, name: str, end: int) -> int:
        close = self.closing[index]
        if close < 0 or close > end:
            return index + 1
        start = index + 1
        plain = name.rstrip("*")
        if name in known.DROPPED_ENVIRONMENTS:
            pass
        elif name in known.MATH_ENVIRONMENTS:
            self._display(start, close, name, plain)
        elif name in known.FLOATS:
            self._floating(start, close, name)
        elif name in known.TABLES:
            outer, self._float = self._float, self._float or "Table"
            self.block(table_text(self, start, close, known.TABLES[name]))
            self._float = outer
        elif name in known.LISTS:
            self._list(start, close, name)
        elif name in known.QUOTES:
            self.flush()
            if text := self.sub(start, close):
                self.blocks.append("\n".join(f"> {line}" if line else ">" for line in text.split("\n")))
        elif name in self.theorems or name in known.THEOREMS:
            self._theorem(start, close, name)
        elif plain == "proof":
            self._proof(start, close)
        elif plain in ("abstract", "onecolabstract"):
            self.flush()
            after, _ = self.optional(start)
            body = self.sub(after, close)
            if body:
                self.blocks += [heading("Abstract", 2), body]
        elif plain == "thebibliography":
            self._reference_list(start, close)
        elif plain in ("algorithmic", "algorithmicx", "algorithm2e", "pseudocode", "codebox"):
            self._pseudo(start, close)
        else:
            self._plain_environment(start, close, name, plain)
        return close + 1

    def _plain_environment(self, start: int, close: int, name: str, plain: str) -> None:
        after, _ = self.optional(start)
        for _ in range(known.ENVIRONMENT_ARGUMENTS.get(name, 0)):
            after, _ = self.optional(after)
            if not self.braced(after):
                break
            after, _ = self.argument(after)
        self.flush()
        if plain in _TITLED:
            self.blocks.append(heading(_TITLED[plain], 2))
        body = self.sub(after, close)
        if plain in ("keywords", "keyword", "IEEEkeywords") and body:
            body = f"Keywords: {body}"
        if body:
            self.blocks.append(body)

    def _display(self, start: int, close: int, name: str, plain: str) -> None:
        if name in ("alignat", "alignat*", "xalignat", "xalignat*", "IEEEeqnarray", "IEEEeqnarray*", "empheq"):
            start, _ = self.optional(start)
            if self.braced(start):
                start, _ = self.argument(start)
        body = self.tokens[start:close]
        if name == "math":
            self.inline.append(inline_math(body))
            return
        numbered = name in known.NUMBERED_MATH
        self.block(display_math(body, known.MATH_ENVIRONMENTS[name], numbered, self.labels))

    def _floating(self, start: int, close: int, name: str) -> None:
        after, _ = self.optional(start)
        for _ in range(known.ENVIRONMENT_ARGUMENTS.get(name, 0)):
            after, _ = self.optional(after)
            if self.braced(after):
                after, _ = self.argument(after)
        outer, self._float = self._float, known.FLOATS[name]
        outer_algorithm, self._algorithm = self._algorithm, self._float == "Algorithm" or self._algorithm
        self.flush()
        if name.startswith("deluxetable"):
            self.blocks.append(table_text(self, start, close, 1))
        else:
            text = self.sub(after, close)
            self.blocks += [block for block in text.split("\n\n") if any(map(str.isalnum, block))]
        self._float, self._algorithm = outer, outer_algorithm

    def _pseudo(self, start: int, close: int) -> None:
        after, _ = self.optional(start)
        outer, self._algorithm = self._algorithm, True
        self.flush()
        text = self.sub(after, close)
        self._algorithm = outer
        if text:
            self.blocks.append(text)

    def _list(self, start: int, close: int, name: str) -> None:
        if name == "list":
            for _ in range(2):
                start, _ = self.argument(start) if self.braced(start) else (start, None)
        items = self._items(start, close)
        self.flush()
        lines = []
        for number, (begin, end) in enumerate(items, 1):
            after, label = self.optional(begin)
            mark = f"{number}." if name in known.NUMBERED_LISTS else "-"
            self.labels.current = ("Item", str(number)) if mark != "-" else self.labels.current
            text = self.sub(after, end)
            if label is not None and (term := self.text(*label)):
                described = name == "description" or len(term) > 3
                text = f"{term}{'' if term.endswith((':', '.', ')')) or not described else ':'} {text}".strip()
                mark = "-" if described else mark
                text = text if described else text.removeprefix(term).strip()
                mark = mark if described else term
            if text:
                lines.append(indented(_tight(text), f"{mark} ", " " * (len(mark) + 1)))
        if lines:
            self.blocks.append("\n".join(lines))
        elif text := self.sub(start, close):
            self.blocks.append(text)

    def _items(self, start: int, close: int) -> list[tuple[int, int]]:
        marks = []
        index = start
        while index < close:
            token = self.tokens[index]
            if token == "\\item":
                marks.append(index)
            elif token.startswith("\\begin") and self.closing[index] > index:
                index = self.closing[index]
            index += 1
        return [(mark + 1, following) for mark, following in zip(marks, [*marks[1:], close], strict=False)]

    def _theorem(self, start: int, close: int, name: str) -> None:
        title, counter, in_section = self.theorems.get(name) or (
            known.THEOREMS[name],
            "" if name[-1] == "*" else name,
            False,
        )
        after, note = self.optional(start)
        lead = title
        if counter:
            lead += f" {self.labels.number(title, f'theorem {counter}', in_section)}"
        if note is not None and (named := self.text(*note)):
            lead += f" ({named})"
        self._led(f"{lead}.", after, close)

    def _proof(self, start: int, close: int) -> None:
        after, note = self.optional(start)
        named = self.text(*note) if note is not None else ""
        lead = named if named.lower().startswith("proof") else f"Proof ({named})" if named else "Proof"
        self._led(f"{lead.rstrip('.')}.", after, close)
        if self.blocks and not self.blocks[-1].endswith("∎"):
            self.blocks[-1] += "\n\n∎" if self.blocks[-1].endswith(("$$", "```", "|")) else " ∎"

    def _led(self, lead: str, start: int, close: int) -> None:
        self.flush()
        body = self.sub(start, close)
        separator = "\n\n" if body.startswith(("$$", "- ", "1. ", "|", "```", "#", ">")) else " "
        self.blocks.append(f"{lead}{separator}{body}" if body else lead)

    def _reference_list(self, start: int, close: int) -> None:
        after, _ = self.argument(start)
        if not self.braced(start):
            after = start
        self.flush()
        # What stands before the first entry is for the typesetter: \small, \providecommand, \itemsep.
        while after < close and self.tokens[after] != "\\bibitem":
            after += 1
        if text := self.sub(after, close):
            self.blocks += [heading("References", 2), text]


_TITLED = {
    "acknowledgments": "Acknowledgments", "acknowledgement": "Acknowledgement", "acknowledgements": "Acknowledgements",
    "acknowledgment": "Acknowledgment", "ack": "Acknowledgments", "acks": "Acknowledgments",
}  # fmt: skip

Special = Callable[[Converter, int], int]
SPECIAL: dict[str, Special] = {
    **dict.fromkeys(("\\title", "\\icmltitle"), Converter._title),
    "\\abstract": Converter._abstract,
    **dict.fromkeys(("\\keywords", "\\keyword"), Converter._keywords),
    **dict.fromkeys(
        ("\\caption", "\\captionof", "\\tablecaption", "\\topcaption", "\\bottomcaption"), Converter._caption
    ),
    **dict.fromkeys(
        ("\\caption*", "\\subcaption", "\\subfloat", "\\subfigure", "\\tablecomments"), Converter._plain_caption
    ),
    **dict.fromkeys(
        ("\\footnote", "\\footnotetext", "\\endnote", "\\tablefootnote", "\\thanksnote"), Converter._footnote
    ),
    "\\label": Converter._label,
    "\\bibitem": Converter._bibitem,
    "\\href": Converter._link,
    **dict.fromkeys(("\\url", "\\path", "\\nolinkurl", "\\doi"), Converter._url),
    **dict.fromkeys(("\\(", "\\["), Converter._math),
    "\\ensuremath": Converter._ensure_math,
    **dict.fromkeys(("\\textsuperscript", "\\textsubscript"), Converter._script),
    **dict.fromkeys(("\\texttt", "\\code", "\\lstinline", "\\pkg", "\\file"), Converter._literal_text),
    **dict.fromkeys(("\\enquote", "\\mkbibquote"), Converter._quoted),
    **dict.fromkeys(("\\hyperref", "\\makebox", "\\framebox"), Converter._second_argument),
    "\\texorpdfstring": Converter._first_argument,
    "\\xspace": Converter._space_if_word,
    **dict.fromkeys(
        ("\\SI", "\\si", "\\num", "\\qty", "\\unit", "\\SIrange", "\\qtyrange", "\\ang"), Converter._quantity
    ),
    **dict.fromkeys(("\\newtheorem", "\\newtheorem*", "\\spnewtheorem"), Converter._new_theorem),
    **dict.fromkeys(("\\appendix", "\\appendices"), Converter._appendix),
    **dict.fromkeys(
        str.split(
            "\\par \\medskip \\bigskip \\smallskip \\newpage \\clearpage \\cleardoublepage \\pagebreak \\maketitle "
            "\\endgraf \\vfill \\vfil \\endproclaim \\enddemo \\enddefinition \\endremark \\endexample \\endref"
        ),
        Converter._end_paragraph,
    ),
    "\\newblock": Converter._new_block,
    "\\twocolumn": Converter._in_one_column,
    "\\multirow": Converter._spanning_rows,
    **dict.fromkeys(("\\acknowledgments", "\\acknowledgements", "\\acknowledgment"), Converter._thanks),
    **dict.fromkeys(("\\proclaim", "\\demo", "\\definition", "\\remark", "\\example"), Converter._proclaim),
    "\\;": Converter._algorithm_line,
    **dict.fromkeys(("\\\\", "\\newline", "\\linebreak", "\\tabularnewline"), Converter._line_break),
}


def _typeset(text: str) -> str:
    """Text as TeX sets it: dashes and quotation marks."""
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
    if "\x04" in text:
        text = _AROUND_BREAK.sub("\n", text)
    return text.strip(" \n")


def _tight(text: str) -> str:
    """The text of a list item whose only other block is a list of its own, without the blank line before it."""
    blocks = text.split("\n\n")
    return "\n".join(blocks) if len(blocks) == 2 and blocks[1].startswith(("- ", "1. ")) else text


def _number(source: str) -> str:
    return source.replace("+-", " ± ").replace("\\pm", " ± ").replace("e", "×10^").strip() if source else ""
