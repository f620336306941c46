r"""A whole LaTeX document as text: title, abstract, body, footnotes, with references resolved."""

from __future__ import annotations

import re

from piledriver.corpus.formats.latex.comments import Aside
from piledriver.corpus.formats.latex.converter import Converter
from piledriver.corpus.formats.latex.environments import write_environment
from piledriver.corpus.formats.latex.labels import resolved
from piledriver.corpus.formats.latex.macros import expanded
from piledriver.corpus.formats.latex.plain_tex import prepared
from piledriver.corpus.formats.latex.text_commands import COMMANDS
from piledriver.corpus.formats.latex.tokens import environment, pair, tokenize
from piledriver.corpus.formats.markdown import heading

_NUMBER_WITHIN = re.compile(
    r"\\numberwithin\s*\{equation\}\s*\{section\}|\\def\\theequation\{\\thesection|\\theequation\}?\s*\{\\thesection|"
    r"\\@addtoreset\{equation\}\{section\}"
)
_PREAMBLE_COMMANDS = frozenset(
    ("\\title", "\\newtheorem", "\\newtheorem*", "\\abstract", "\\icmltitle", "\\spnewtheorem")
)


def latex_to_text(source: str, aside: Aside) -> str:
    r"""Return the readable text of a source that `gather_inputs` made.

    >>> latex_to_text(r"\section{One}Let $x>0$.\begin{itemize}\item a\item b\end{itemize}", Aside())
    '## One\n\nLet $x>0$.\n\n- a\n- b'
    """
    tokens, closing = pair(expanded(tokenize(prepared(source))))
    converter = Converter(tokens, closing, aside, commands=COMMANDS, environment=write_environment)
    converter.labels.equations_within_sections = _NUMBER_WITHIN.search(source) is not None
    if re.search(r"\\document(?:class|style)[^{]{0,200}\{[^}]{0,200}(revtex|aps)", source):
        converter.labels.style = "revtex"
    elif re.search(r"\\documentclass[^{]{0,200}\{[^}]{0,200}IEEE", source):
        converter.labels.style = "ieee"
    if re.search(r"\\usepackage[^{]{0,200}\{[^}]{0,200}(?:acl|naacl|emnlp|coling)", source):
        converter.citations.plain_cite = "citep"
    return _document(converter)


def _document(converter: Converter) -> str:
    start, end = _body(converter)
    _read_preamble(converter, start)
    _read_citation_keys(converter, start)
    converter.render(start, end)
    converter.flush()
    blocks = converter.blocks
    if converter.title:
        blocks.insert(0, heading(converter.title, 1))
    blocks.extend(f"[^{number}]: {note}" for number, note in enumerate(converter.notes, 1))
    return resolved("\n\n".join(blocks), converter.labels)


def _body(converter: Converter) -> tuple[int, int]:
    """Return the range of the document environment, or of everything where there is none."""
    tokens = converter.tokens
    for index, token in enumerate(tokens):
        if token.startswith("\\begin") and environment(token) == "document":
            end = converter.closing[index]
            return index + 1, end if end >= 0 else len(tokens)
    return 0, len(tokens)


def _read_preamble(converter: Converter, end: int) -> None:
    """Write the parts of a preamble that are text or names: title, abstract, theorems."""
    index = 0
    while index < end:
        token = converter.tokens[index]
        if token in _PREAMBLE_COMMANDS or (
            environment(token) == "abstract" and token.startswith("\\begin") and converter.closing[index] > 0
        ):
            index = converter.command(index, end)
        else:
            index += 1
    converter.flush()


def _read_citation_keys(converter: Converter, start: int) -> None:
    """Read the keys of the bibliography, which comes after the text that cites it."""
    for index in range(start, len(converter.tokens)):
        if converter.tokens[index] == "\\bibitem":
            after, label = converter.optional(index + 1)
            after, key = converter.argument(after)
            converter.citations.add(converter.raw(*key).strip(), converter.text(*label)[:500] if label else "")
