"""LaTeX sources to readable text, in linear time and bounded memory: the whole way from files to Markdown-like text.

`files` finds the main file and puts its inputs together; `comments` takes comments out and verbatim text aside;
`tokens` cuts the source; `macros` expands what the authors defined; `convert` writes the text.
"""

from piledriver.corpus.formats.latex.convert import to_text
from piledriver.corpus.formats.latex.files import gathered, main_files

__all__ = ["gathered", "main_files", "to_text"]
