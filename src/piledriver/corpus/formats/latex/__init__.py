r"""LaTeX sources to Markdown-like text, in linear time and bounded memory.

`files` finds the main file and inserts its inputs; `comments` removes comments and sets verbatim text aside; `tokens`
splits the source; `macros` expands the authors' definitions; `converter` walks the tokens, with handlers in
`text_commands` and `environments`; `document` assembles the text.

Why no library. pandoc, which the original used, drops title and abstract from its text (they are metadata to it),
prints no citations of a `thebibliography`, returns nothing for a paper that it cannot parse, and is several times
slower, with a process for each paper (`benchmarks/sources.py --only arxiv`). It does expand macros with delimited
arguments (`\def\pair<#1,#2>`), which are left alone here. pylatexenc leaves out the authors' macros and prints `<ref>`
and `<cit.>` for references and citations.
"""

from piledriver.corpus.formats.latex.document import latex_to_text
from piledriver.corpus.formats.latex.files import gather_inputs, main_files

__all__ = ["gather_inputs", "latex_to_text", "main_files"]
