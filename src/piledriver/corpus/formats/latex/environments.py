r"""Handlers of environments: formulas, figures, tables, lists, theorems, quotations, pseudo-code, bibliographies."""

from __future__ import annotations

from piledriver.corpus.formats.latex import commands as known
from piledriver.corpus.formats.latex.converter import Converter
from piledriver.corpus.formats.latex.mathematics import display_math, inline_math
from piledriver.corpus.formats.latex.tables import table_text
from piledriver.corpus.formats.markdown import heading, indented

_TITLED = {
    "acknowledgments": "Acknowledgments", "acknowledgement": "Acknowledgement", "acknowledgements": "Acknowledgements",
    "acknowledgment": "Acknowledgment", "ack": "Acknowledgments", "acks": "Acknowledgments",
}  # fmt: skip


def write_environment(converter: Converter, index: int, name: str, end: int) -> int:
    """Write the environment that opens at `index`; return the index at which to continue.

    Of one that never closes only the opening token is skipped.
    """
    close = converter.closing[index]
    if close < 0 or close > end:
        return index + 1
    start = index + 1
    plain = name.rstrip("*")
    # As in LaTeX, the meaning of a label ends with the environment that set the number.
    current = converter.labels.current
    if name in known.DROPPED_ENVIRONMENTS:
        pass
    elif name in known.MATH_ENVIRONMENTS:
        _display(converter, start, close, name, plain)
    elif name in known.FLOATS:
        _floating(converter, start, close, name)
    elif name in known.TABLES:
        outer, converter.float_name = converter.float_name, converter.float_name or "Table"
        converter.block(table_text(converter, start, close, known.TABLES[name]))
        converter.float_name = outer
    elif name in known.LISTS:
        _list(converter, start, close, name)
    elif name in known.QUOTES:
        converter.flush()
        if text := converter.sub(start, close):
            converter.blocks.append("\n".join(f"> {line}" if line else ">" for line in text.split("\n")))
    elif name in converter.theorems or name in known.THEOREMS:
        _theorem(converter, start, close, name)
    elif plain == "proof":
        _proof(converter, start, close)
    elif plain in ("abstract", "onecolabstract"):
        converter.flush()
        after, _ = converter.optional(start)
        body = converter.sub(after, close)
        if body:
            converter.blocks += [heading("Abstract", 2), body]
    elif plain == "thebibliography":
        _reference_list(converter, start, close)
    elif plain in ("algorithmic", "algorithmicx", "algorithm2e", "pseudocode", "codebox"):
        _pseudo(converter, start, close)
    else:
        _plain_environment(converter, start, close, name, plain)
    converter.labels.current = current
    return close + 1


def _plain_environment(converter: Converter, start: int, close: int, name: str, plain: str) -> None:
    after = converter.after_arguments(start, known.ENVIRONMENT_ARGUMENTS.get(name, 0))
    converter.flush()
    if plain in _TITLED:
        converter.blocks.append(heading(_TITLED[plain], 2))
    body = converter.sub(after, close)
    if plain in ("keywords", "keyword", "IEEEkeywords") and body:
        body = f"Keywords: {body}"
    if body:
        converter.blocks.append(body)


def _display(converter: Converter, start: int, close: int, name: str, plain: str) -> None:
    if name in ("alignat", "alignat*", "xalignat", "xalignat*", "IEEEeqnarray", "IEEEeqnarray*", "empheq"):
        start, _ = converter.optional(start)
        if converter.braced(start):
            start, _ = converter.argument(start)
    body = converter.tokens[start:close]
    if name == "math":
        converter.inline.append(inline_math(body))
        return
    numbered = name in known.NUMBERED_MATH
    converter.block(display_math(body, known.MATH_ENVIRONMENTS[name], numbered, converter.labels))


def _floating(converter: Converter, start: int, close: int, name: str) -> None:
    after = converter.after_arguments(start, known.ENVIRONMENT_ARGUMENTS.get(name, 0))
    outer, outer_algorithm = converter.float_name, converter.in_algorithm
    converter.float_name = known.FLOATS[name]
    converter.in_algorithm = converter.float_name == "Algorithm" or converter.in_algorithm
    # A label before the caption names a part of the figure, whose number is unknown.
    converter.labels.current = ("", "")
    converter.flush()
    if name.startswith("deluxetable"):
        converter.blocks.append(table_text(converter, start, close, 1))
    else:
        text = converter.sub(after, close)
        converter.blocks += [block for block in text.split("\n\n") if any(map(str.isalnum, block))]
    converter.float_name, converter.in_algorithm = outer, outer_algorithm


def _pseudo(converter: Converter, start: int, close: int) -> None:
    after, _ = converter.optional(start)
    outer, converter.in_algorithm = converter.in_algorithm, True
    converter.flush()
    text = converter.sub(after, close)
    converter.in_algorithm = outer
    if text:
        converter.blocks.append(text)


def _list(converter: Converter, start: int, close: int, name: str) -> None:
    if name == "list":
        start = converter.after_arguments(start, 2)
    items = _items(converter, start, close)
    converter.flush()
    lines = []
    for number, (begin, end) in enumerate(items, 1):
        after, label = converter.optional(begin)
        mark = f"{number}." if name in known.NUMBERED_LISTS else "-"
        converter.labels.current = ("Item", str(number)) if mark != "-" else converter.labels.current
        text = converter.sub(after, end)
        if label is not None and (term := converter.text(*label)):
            described = name == "description" or len(term) > 3
            text = f"{term}{'' if term.endswith((':', '.', ')')) or not described else ':'} {text}".strip()
            mark = "-" if described else mark
            text = text if described else text.removeprefix(term).strip()
            mark = mark if described else term
        if text:
            lines.append(indented(_tight(text), f"{mark} ", " " * (len(mark) + 1)))
    if lines:
        converter.blocks.append("\n".join(lines))
    elif text := converter.sub(start, close):
        converter.blocks.append(text)


def _items(converter: Converter, start: int, close: int) -> list[tuple[int, int]]:
    marks = []
    index = start
    while index < close:
        token = converter.tokens[index]
        if token == "\\item":
            marks.append(index)
        elif token.startswith("\\begin") and converter.closing[index] > index:
            index = converter.closing[index]
        index += 1
    return [(mark + 1, following) for mark, following in zip(marks, [*marks[1:], close], strict=False)]


def _theorem(converter: Converter, start: int, close: int, name: str) -> None:
    standard = (known.THEOREMS.get(name, ""), "" if name[-1] == "*" else name, False)
    title, counter, in_section = converter.theorems.get(name) or standard
    after, note = converter.optional(start)
    lead = title
    if counter:
        lead += f" {converter.labels.number(title, f'theorem {counter}', in_section)}"
    if note is not None and (named := converter.text(*note)):
        lead += f" ({named})"
    _led(converter, f"{lead}.", after, close)


def _proof(converter: Converter, start: int, close: int) -> None:
    after, note = converter.optional(start)
    named = converter.text(*note) if note is not None else ""
    lead = named if named.lower().startswith("proof") else f"Proof ({named})" if named else "Proof"
    _led(converter, f"{lead.rstrip('.')}.", after, close)
    if converter.blocks and not converter.blocks[-1].endswith("∎"):
        converter.blocks[-1] += "\n\n∎" if converter.blocks[-1].endswith(("$$", "```", "|")) else " ∎"


def _led(converter: Converter, lead: str, start: int, close: int) -> None:
    converter.flush()
    body = converter.sub(start, close)
    separator = "\n\n" if body.startswith(("$$", "- ", "1. ", "|", "```", "#", ">")) else " "
    converter.blocks.append(f"{lead}{separator}{body}" if body else lead)


def _reference_list(converter: Converter, start: int, close: int) -> None:
    after = converter.argument(start)[0] if converter.braced(start) else start
    converter.flush()
    # Anything before the first entry is for the typesetter: \small, \providecommand, \itemsep.
    while after < close and converter.tokens[after] != "\\bibitem":
        after += 1
    if text := converter.sub(after, close):
        converter.blocks += [heading("References", 2), text]


def _tight(text: str) -> str:
    """Return the text of a list item, without the blank line before a list that is its only other block."""
    blocks = text.split("\n\n")
    return "\n".join(blocks) if len(blocks) == 2 and blocks[1].startswith(("- ", "1. ")) else text
