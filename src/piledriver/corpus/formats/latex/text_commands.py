r"""Handlers of single commands: titles, captions, notes, citations, references, links, quantities."""

from __future__ import annotations

from collections.abc import Callable

from piledriver.corpus.formats.latex import commands as known
from piledriver.corpus.formats.latex.converter import Command, Converter
from piledriver.corpus.formats.latex.labels import reference_mark
from piledriver.corpus.formats.latex.mathematics import display_math, inline_math
from piledriver.corpus.formats.markdown import heading, lowered, raised


def _writes(text: Callable[[Converter, tuple[int, int]], str]) -> Command:
    """Return the handler of a command that writes a text made of its argument."""

    def write(converter: Converter, index: int) -> int:
        after, argument = converter.argument(index + 1)
        converter.inline.append(text(converter, argument))
        return after

    return write


def _then(act: Callable[[Converter], None]) -> Command:
    """Return the handler of a command without arguments."""

    def run(converter: Converter, index: int) -> int:
        act(converter)
        return converter.after_word(index)

    return run


def _section(converter: Converter, index: int) -> int:
    """Write a heading; those with a star have no number."""
    token = converter.tokens[index]
    after, title = converter.delimited(index)
    level = known.SECTIONS[token.rstrip("*")]
    if level == 0:
        converter.inline.append(converter.raw(*title))
        return after
    converter.flush()
    if not token.endswith("*"):
        converter.labels.section(level)
    if text := converter.text(*title):
        converter.blocks.append(heading(text, level))
    return after


def _title(converter: Converter, index: int) -> int:
    after, title = converter.delimited(index)
    if text := converter.text(*title).replace("\n", " "):
        converter.title = text
    return after


def _abstract(converter: Converter, index: int) -> int:
    after, body = converter.delimited(index)
    if text := converter.sub(*body):
        converter.block(heading("Abstract", 2))
        converter.block(text)
    return after


def _proclaim(converter: Converter, index: int) -> int:
    """Write the name of a theorem or a proof of AMS-TeX."""
    after, name = converter.argument(index + 1)
    converter.flush()
    if text := converter.text(*name):
        converter.inline.append(f"{text.rstrip('.')}. ")
    return after


def _keywords(converter: Converter, index: int) -> int:
    after, words = converter.argument(index + 1)
    if text := converter.text(*words):
        converter.block(f"Keywords: {text}")
    return after


def _caption(converter: Converter, index: int) -> int:
    after, _ = converter.optional(index + 1)
    if converter.tokens[index] == "\\captionof":
        after, kind = converter.argument(after)
        converter.float_name = converter.raw(*kind).strip().capitalize() or converter.float_name
        after, _ = converter.optional(after)
    after, caption = converter.argument(after)
    name = converter.float_name or "Figure"
    number = converter.labels.number(name, name)
    text = converter.sub(*caption)
    converter.block(f"{name} {number}: {text}" if text else f"{name} {number}")
    return after


def _plain_caption(converter: Converter, index: int) -> int:
    """Write the caption of a part of a figure, which has no number and precedes its part in brackets."""
    after, caption = converter.optional(index + 1)
    after, _ = converter.optional(after)
    if caption is not None:
        converter.block(converter.sub(*caption))
    after, body = converter.argument(after)
    converter.block(converter.sub(*body))
    return after


def _in_one_column(converter: Converter, index: int) -> int:
    r"""Write the head of a paper, in the brackets of `\twocolumn[...]`."""
    start = converter.skip_space(index + 1)
    if start >= len(converter.tokens) or converter.tokens[start] != "[":
        return index + 1
    at = start + 1
    while at < len(converter.tokens) and converter.tokens[at] != "]":
        at = converter.closing[at] + 1 if converter.closing[at] > at else at + 1
    converter.render(start + 1, at)
    converter.flush()
    return at + 1


def _spanning_rows(converter: Converter, index: int) -> int:
    after, _ = converter.optional(index + 1)
    after, _ = converter.argument(after)
    after, _ = converter.optional(after)
    after = converter.skip_space(after)
    if after < len(converter.tokens) and converter.tokens[after].lstrip().startswith("*"):
        # The width of \multirow, without braces.
        converter.tokens[after] = converter.tokens[after].lstrip()[1:] or " "
        return after
    after, _ = converter.argument(after)
    return after


def _footnote(converter: Converter, index: int) -> int:
    after, _ = converter.optional(index + 1)
    after, note = converter.argument(after)
    number = len(converter.notes)
    converter.notes.append("")
    converter.notes[number] = converter.text(*note)
    if converter.notes[number]:
        while converter.inline and converter.inline[-1].isspace():
            converter.inline.pop()
        if converter.tokens[index] != "\\footnotetext":
            converter.inline.append(f"[^{number + 1}]")
    else:
        del converter.notes[number:]
    return after


def _label(converter: Converter, index: int) -> int:
    after, name = converter.argument(index + 1)
    converter.labels.set(converter.raw(*name).strip())
    return after


def _reference(converter: Converter, index: int) -> int:
    """Write a placeholder, which is resolved when all labels are known."""
    token = converter.tokens[index].lstrip("\\").rstrip("*")
    after, _ = converter.optional(index + 1)
    after, name = converter.argument(after)
    if token in ("pageref", "vpageref"):
        # Page numbers mean nothing in text.
        converter.inline.append(f"[{converter.raw(*name).strip()}]")
        return after
    style = "equation" if token in ("eqref", "Eqref") else "named" if token in ("autoref", "cref", "Cref") else "number"
    converter.inline.append(reference_mark(converter.raw(*name).strip(), style))
    return after


def _cite(converter: Converter, index: int) -> int:
    """Write a citation with its prefix and suffix."""
    after, first = converter.optional(index + 1)
    after, second = converter.optional(after)
    if not converter.braced(after):
        return after
    after, names = converter.argument(after)
    keys = [key.strip() for key in converter.raw(*names).split(",") if key.strip()]
    before = converter.text(*first) if first and second else ""
    behind = converter.text(*second) if second else converter.text(*first) if first else ""
    converter.inline.append(converter.citations.cite(converter.tokens[index], keys, before, behind))
    return after


def _bibitem(converter: Converter, index: int) -> int:
    after, _label = converter.optional(index + 1)
    after, key = converter.argument(after)
    converter.flush()
    name = converter.raw(*key).strip()
    citations = converter.citations
    # In a list with authors and years an entry without them has no number either.
    if name not in citations.authors and 2 * len(citations.authors) <= len(citations.numbers):
        converter.inline.append(f"[{citations.numbers.get(name, name)}] ")
    return after


def _link(converter: Converter, index: int) -> int:
    after, _ = converter.optional(index + 1)
    after, url = converter.argument(after)
    if not converter.braced(after):
        converter.inline.append(_url_text(converter, url))
        return after
    after, text = converter.argument(after)
    shown = converter.text(*text)
    converter.inline.append(shown or _url_text(converter, url))
    return after


def _url_text(converter: Converter, url: tuple[int, int]) -> str:
    return converter.raw(*url).replace("\\", "").strip()


def _math(converter: Converter, index: int) -> int:
    close = converter.closing[index]
    if close < 0:
        return index + 1
    body = converter.tokens[index + 1 : close]
    if converter.tokens[index] == "\\(":
        converter.inline.append(inline_math(body))
    else:
        converter.block(display_math(body, "", False, converter.labels))
    return close + 1


def _script(converter: Converter, index: int) -> int:
    after, body = converter.argument(index + 1)
    text = converter.text(*body)
    converter.inline.append(raised(text) if "super" in converter.tokens[index] else lowered(text))
    return after


def _literal_text(converter: Converter, index: int) -> int:
    after, body = converter.argument(index + 1)
    outer, converter.literal = converter.literal, True
    converter.inline.append(converter.sub(*body))
    converter.literal = outer
    return after


def _second_argument(converter: Converter, index: int) -> int:
    after, _ = converter.optional(index + 1)
    after, _ = converter.argument(after)
    after, _ = converter.optional(after)
    return after


def _first_argument(converter: Converter, index: int) -> int:
    after, body = converter.argument(index + 1)
    converter.inline.append(converter.sub(*body))
    after, _ = converter.argument(after)
    return after


def _space_if_word(converter: Converter, index: int) -> int:
    following = converter.tokens[index + 1] if index + 1 < len(converter.tokens) else " "
    if following[0].isalnum() or (following[0] in "($\\" and not following.startswith(("\\'", "\\@", "\\/", "\\,"))):
        converter.inline.append(" ")
    return index + 1


def _quantity(converter: Converter, index: int) -> int:
    after, _ = converter.optional(index + 1)
    after, number = converter.argument(after)
    parts = [_number(converter.raw(*number))] if converter.tokens[index][1:] != "si" else []
    if converter.tokens[index] in ("\\si", "\\unit"):
        parts = [_unit(converter, number)]
    elif converter.tokens[index] in ("\\SI", "\\qty", "\\SIrange", "\\qtyrange"):
        if "range" in converter.tokens[index]:
            after, number = converter.argument(after)
            parts.append(f"to {_number(converter.raw(*number))}")
        after, unit = converter.argument(after)
        parts.append(_unit(converter, unit))
    converter.inline.append(" ".join(filter(None, parts)))
    return after


def _unit(converter: Converter, unit: tuple[int, int]) -> str:
    out = ""
    for token in converter.tokens[slice(*unit)]:
        out += known.UNITS.get(token[1:], token[1:]) if token[0] == "\\" else token.strip("{} ").replace("~", " ")
    return out


def _new_theorem(converter: Converter, index: int) -> int:
    after, name = converter.argument(index + 1)
    after, shared = converter.optional(after)
    after, title = converter.argument(after)
    after, within = converter.optional(after)
    key = converter.raw(*name).strip()
    counter, in_section = key, bool(within and "section" in converter.raw(*within))
    if shared:
        counter = converter.raw(*shared).strip()
        in_section = converter.theorems.get(counter, ("", "", False))[2]
        counter = converter.theorems.get(counter, ("", counter, False))[1]
    numbered = converter.tokens[index] != "\\newtheorem*"
    converter.theorems[key] = (converter.text(*title), counter if numbered else "", in_section)
    return after


def _line_break(converter: Converter, index: int) -> int:
    converter.inline.append(known.LINE_BREAK)
    after, _ = converter.optional(index + 1)
    return after


def _number(source: str) -> str:
    return source.replace("+-", " ± ").replace("\\pm", " ± ").replace("e", "×10^").strip() if source else ""


COMMANDS: dict[str, Command] = {
    **{name + star: _section for name in known.SECTIONS for star in ("", "*")},
    **dict.fromkeys(known.CITATIONS, _cite),
    **dict.fromkeys(known.REFERENCES, _reference),
    **dict.fromkeys(("\\title", "\\icmltitle"), _title),
    "\\abstract": _abstract,
    **dict.fromkeys(("\\keywords", "\\keyword"), _keywords),
    **dict.fromkeys(("\\caption", "\\captionof", "\\tablecaption", "\\topcaption", "\\bottomcaption"), _caption),
    **dict.fromkeys(("\\caption*", "\\subcaption", "\\subfloat", "\\subfigure", "\\tablecomments"), _plain_caption),
    **dict.fromkeys(("\\footnote", "\\footnotetext", "\\endnote", "\\tablefootnote", "\\thanksnote"), _footnote),
    "\\label": _label,
    "\\bibitem": _bibitem,
    "\\href": _link,
    **dict.fromkeys(("\\url", "\\path", "\\nolinkurl", "\\doi"), _writes(_url_text)),
    **dict.fromkeys(("\\(", "\\["), _math),
    "\\ensuremath": _writes(lambda converter, body: inline_math(converter.tokens[slice(*body)])),
    **dict.fromkeys(("\\textsuperscript", "\\textsubscript"), _script),
    **dict.fromkeys(("\\texttt", "\\code", "\\lstinline", "\\pkg", "\\file"), _literal_text),
    **dict.fromkeys(("\\enquote", "\\mkbibquote"), _writes(lambda converter, body: f"“{converter.text(*body)}”")),
    **dict.fromkeys(("\\hyperref", "\\makebox", "\\framebox"), _second_argument),
    "\\texorpdfstring": _first_argument,
    "\\xspace": _space_if_word,
    **dict.fromkeys(("\\SI", "\\si", "\\num", "\\qty", "\\unit", "\\SIrange", "\\qtyrange", "\\ang"), _quantity),
    **dict.fromkeys(("\\newtheorem", "\\newtheorem*", "\\spnewtheorem"), _new_theorem),
    **dict.fromkeys(("\\appendix", "\\appendices"), _then(lambda converter: converter.labels.appendix())),
    **dict.fromkeys(
        str.split(
            "\\par \\medskip \\bigskip \\smallskip \\newpage \\clearpage \\cleardoublepage \\pagebreak \\maketitle "
            "\\endgraf \\vfill \\vfil \\endproclaim \\enddemo \\enddefinition \\endremark \\endexample \\endref"
        ),
        _then(Converter.flush),
    ),
    "\\newblock": _then(lambda converter: converter.inline.append(" ")),
    "\\twocolumn": _in_one_column,
    "\\multirow": _spanning_rows,
    **dict.fromkeys(
        ("\\acknowledgments", "\\acknowledgements", "\\acknowledgment"),
        _then(lambda converter: converter.block(heading("Acknowledgments", 2))),
    ),
    **dict.fromkeys(("\\proclaim", "\\demo", "\\definition", "\\remark", "\\example"), _proclaim),
    "\\;": _then(lambda converter: converter.inline.append(known.LINE_BREAK if converter.in_algorithm else " ")),
    **dict.fromkeys(("\\\\", "\\newline", "\\linebreak", "\\tabularnewline"), _line_break),
}
