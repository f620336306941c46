r"""Rewrite plain TeX in LaTeX: fonts, lines, items, numbers of equations.

Papers of the first years of arXiv are plain TeX, and LaTeX papers borrow from it.
"""

from __future__ import annotations

import re

_FONT = re.compile(
    r"\\font[ \t]*(\\[A-Za-z@]{1,40})[ \t]*=?[ \t]*[A-Za-z0-9_./:-]{1,60}"
    r"(?:[ \t]+(?:scaled|at)[ \t]*(?:\\magstep(?:half|[ \t]*\d)|[\d.]{1,9}(?:[ \t]*(?:true)?[a-z]{2})?))?"
)
_EQUATION_NUMBER = re.compile(
    r"\\(?:leqno|eqno)[ \t]*(?:\(([^()$\\\n]{1,20})\)|\{[ \t]*\(([^(){}$\\\n]{1,20})\)[ \t]*\})"
)
_ITEM = re.compile(r"\\(?:item|itemitem)[ \t]*(?=\{)")
_FOOTNOTE = re.compile(r"\\footnote[ \t]*(?=\{[^{}]{0,20}(?:\{[^{}]{0,20}\}[^{}]{0,20})?\}[ \t\n]{0,9}\{)")
_LINES = r"\def\centerline#1{\par #1\par}\def\leftline#1{\par #1\par}\def\rightline#1{\par #1\par}" "\n"
_PLAIN = r"\def\plainitem#1{\par #1 }\def\plainfootnote#1#2{\footnote{#2}}" "\n"


def prepared(source: str) -> str:
    r"""Return the source with the commands of plain TeX rewritten.

    >>> prepared(r"$$x \eqno(1)$$")
    '$$x \\tag{1}$$'
    """
    if "\\font" in source:
        source = _FONT.sub(r"\\def\1{}", source)
    if "eqno" in source:
        source = _EQUATION_NUMBER.sub(lambda found: f"\\tag{{{found[1] or found[2]}}}", source)
    added = ""
    if "line{" in source or "line {" in source:
        added = _LINES
    if "\\documentclass" not in source and "\\documentstyle" not in source and "\\begin{document}" not in source:
        source, items = _ITEM.subn(r"\\plainitem", source)
        source, notes = _FOOTNOTE.subn(r"\\plainfootnote", source)
        added += _PLAIN if items or notes else ""
    return added + source
