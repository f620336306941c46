"""Tabular environments to pipe tables."""

from __future__ import annotations

from piledriver.corpus.formats.latex.converter import Converter
from piledriver.corpus.formats.latex.tokens import environment
from piledriver.corpus.formats.markdown import MAX_COLUMNS, pipe_table

_ENDS = frozenset(
    ("\\\\", "\\tabularnewline", "\\cr", "\\\\*", "\\endhead", "\\endfirsthead", "\\endfoot", "\\endlastfoot", "\\nl")
)
_RULES = frozenset(
    str.split(
        "\\hline \\toprule \\midrule \\bottomrule \\hhline \\cline \\cmidrule \\specialrule \\addlinespace \\startdata "
        "\\enddata \\Xhline \\tablehead \\hdashline \\thickhline \\centering \\noalign \\morecmidrules \\rowstyle"
    )
)


def table_text(converter: Converter, start: int, close: int, arguments: int) -> str:
    """Return the rows of the table in a range as a pipe table; a single column only stacks lines and stays lines."""
    tokens, closing = converter.tokens, converter.closing
    index = converter.after_arguments(start, arguments) if arguments else start
    rows: list[list[str]] = [[]]
    captions: list[str] = []
    begin = index

    def cell(end: int) -> None:
        if len(rows[-1]) < MAX_COLUMNS:
            rows[-1].extend(_cell(converter, begin, end, captions))

    while index < close:
        token = tokens[index]
        if token == "&":
            cell(index)
            begin = index = index + 1
        elif token in _ENDS:
            cell(index)
            rows.append([])
            index, _ = converter.optional(index + 1)
            begin = index
        elif closing[index] > index and (token == "{" or environment(token) or token[0] == "$"):
            index = closing[index] + 1
        else:
            index += 1
    cell(close)
    rows = [row for row in rows if any(row)]
    body = "\n".join(row[0] for row in rows) if rows and max(map(len, rows)) == 1 else pipe_table(rows)
    return "\n\n".join([*captions, body])


def _cell(converter: Converter, start: int, end: int, captions: list[str]) -> list[str]:
    """Return the text of a cell, and an empty string for each further column that it spans."""
    tokens = converter.tokens
    start = converter.skip_space(start)
    while start < end and (
        tokens[start] in _RULES or tokens[start].isspace() or tokens[start] in ("\\caption", "\\label")
    ):
        token = tokens[start]
        start += 1
        if token in ("\\caption", "\\label"):
            outer = converter.blocks, converter.inline
            converter.blocks, converter.inline = [], []
            start = converter.command(start - 1, end)
            captions.extend(converter.blocks)
            converter.blocks, converter.inline = outer
        elif token in _RULES:
            if start < end and tokens[start].startswith("("):
                # \cmidrule(lr){2-3}
                start += 1
            start, _ = converter.optional(start)
            if (
                converter.braced(start)
                and converter.skip_space(start) < end
                and token not in ("\\hline", "\\centering")
            ):
                start, _ = converter.argument(start)
    if start < end and tokens[start] == "\\multicolumn":
        after, count = converter.argument(start + 1)
        after, _ = converter.argument(after)
        after, body = converter.argument(after)
        number = converter.raw(*count).strip()
        span = min(int(number), MAX_COLUMNS) if number.isdecimal() and len(number) < 4 else 1
        rest = converter.text(after, end) if after < end else ""
        return [f"{converter.text(*body)} {rest}".strip(), *[""] * (span - 1)]
    return [converter.text(start, end)]
