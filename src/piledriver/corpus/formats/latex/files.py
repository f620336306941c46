r"""Find the main file of a submission and insert its inputs, resolved inside the archive only."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

from piledriver.corpus.formats.latex.bibliography import as_list, is_biber
from piledriver.corpus.formats.latex.comments import Aside, without_comments

MAX_DEPTH = 16
# A file may be read more than once, so the whole may be larger than its files, up to this factor and this many bytes.
GROWTH, GROWTH_BYTES = 4, 1 << 20
MAX_INCLUSIONS = 2_000

_CLASS = re.compile(r"^[^%\n]{0,200}?\\document(?:class|style)\b", re.MULTILINE)
_PLAIN = re.compile(
    r"\\bye\b|\\magnification|\\input\s+(?:amstex|harvmac|phyzzx|jnl|epsf)|^\\end\s*$|\\beginsection", re.MULTILINE
)
_INPUT = re.compile(
    r"\\(?:input|include|subfile|subfileinclude|InputIfFileExists|loadglsentries)\s*\{\s*([^{}\n]{1,200})\}"
    r"|\\(?:import|subimport|inputfrom|subincludefrom|includefrom)\*?\s*\{([^{}\n]{0,200})\}\s*\{([^{}\n]{1,200})\}"
    r"|\\input\s+([^\s{}\\%]{1,200})"
    r"|\\(?:usepackage|RequirePackage)\s*(?:\[[^\]]{0,500}\])?\s*\{([^{}]{1,500})\}"
    r"|\\(bibliography|printbibliography)(?![A-Za-z])(?:\s*\{[^{}]{0,500}\}|\s*\[[^\[\]]{0,500}\])?"
)
_STANDALONE = re.compile(r"\\documentclass[^{\n]{0,200}\{(?:standalone|tikzposter|beamer)\}")
_NAMES = ("ms.tex", "main.tex", "paper.tex", "article.tex", "manuscript.tex", "root.tex")


def main_files(files: Mapping[str, str]) -> list[str]:
    """Return the files that are papers of their own, the likeliest first; an empty list where no file is TeX.

    >>> main_files({"a.tex": "\\\\section{x}", "p.tex": "\\\\documentclass{article}\\\\input{a}"})
    ['p.tex']
    """
    ignored, chosen = _readme(files)
    tex = [name for name in sorted(files) if name not in ignored and _may_be_tex(name)]
    tops = [name for name in chosen if name in files] or [name for name in tex if _CLASS.search(files[name])]
    if not tops:
        plain = [name for name in tex if _PLAIN.search(files[name])]
        return [max(plain or tex, key=lambda name: len(files[name]))] if tex else []
    included = {
        target
        for name in tex
        for found in _INPUT.finditer(files[name])
        if (target := _target(found, files, posixpath.dirname(name))) and target != name
    }
    roots = [name for name in tops if name not in included] or tops
    # Pictures that compile on their own are no papers; slides are, in the absence of others.
    roots = [name for name in roots if not _STANDALONE.search(files[name][:5000])] or roots

    def likelihood(name: str) -> tuple[bool, bool, bool, int]:
        named = posixpath.basename(name).lower() in _NAMES
        has_bibliography = f"{_stem(name)}.bbl" in files
        return "\\begin{document}" not in files[name], not named, not has_bibliography, -len(files[name])

    return sorted(roots, key=likelihood)


def gather_inputs(files: Mapping[str, str], main: str, aside: Aside) -> str:
    """Return the main file with its inputs inserted, without comments, with verbatim text set aside.

    Nothing outside `files` is read; missing files are skipped, and depth, count and size of inputs are limited.
    """
    cleaned: dict[str, str] = {}
    budget = [GROWTH_BYTES + GROWTH * sum(map(len, files.values())), MAX_INCLUSIONS]
    packages: set[str] = set()
    being_read: set[str] = set()

    def expand(name: str, depth: int) -> str:
        if name not in cleaned:
            cleaned[name] = without_comments(files[name], aside)
        source = cleaned[name]
        budget[0] -= len(source)
        budget[1] -= 1
        if name in being_read or min(budget) < 0:
            return ""
        if depth >= MAX_DEPTH:
            return source
        being_read.add(name)
        out: list[str] = []
        at = 0
        for found in _INPUT.finditer(source):
            out.append(source[at : found.start()])
            at = found.end()
            if found[6]:
                bibliography = _bibliography(files, main)
                if bibliography and is_biber(files[bibliography]):
                    out.append(as_list(files[bibliography]))
                elif bibliography:
                    out.append(expand(bibliography, depth + 1))
            elif found[5]:
                for package in found[5].split(","):
                    style = f"{package.strip()}.sty"
                    if style in files and style not in packages and _is_own(files[style]):
                        packages.add(style)
                        out.append(expand(style, MAX_DEPTH))
            else:
                folders = (posixpath.dirname(main), posixpath.dirname(name))
                target = next(filter(None, (_target(found, files, folder) for folder in folders)), None)
                text = expand(target, depth + 1) if target else ""
                text = _body(text) if "\\begin{document}" in text else text
                # The end of a file is the end of a line; \include also ends the page.
                if target and found[0].startswith("\\include"):
                    out.append(f"\n\n{text}\n\n")
                else:
                    out.append(f"{text}\n" if text and not text.endswith("\n") else text)
        out.append(source[at:])
        being_read.discard(name)
        return "".join(out)

    return expand(main, 0)


def _body(source: str) -> str:
    start = source.find("\\begin{document}") + len("\\begin{document}")
    end = source.find("\\end{document}", start)
    return source[start : end if end >= 0 else len(source)]


def _is_own(style: str) -> bool:
    # A macro file of the authors; the style of a publisher or conference would redefine commands handled here.
    return len(style) < 40_000 and "\\ProvidesPackage" not in style and "\\@startsection" not in style


def _target(found: re.Match[str], files: Mapping[str, str], folder: str) -> str | None:
    name = found[1] or found[4] or (f"{found[2]}/{found[3]}" if found[3] else None)
    if not name:
        return None
    path = posixpath.normpath(posixpath.join(folder, name.strip().strip('"').replace("\\", "/")))
    return next((name for name in (path, f"{path}.tex", f"{path}.ltx", f"{path}.TEX") if name in files), None)


def _bibliography(files: Mapping[str, str], main: str) -> str | None:
    own = f"{_stem(main)}.bbl"
    if own in files:
        return own
    others = [name for name in files if name.lower().endswith(".bbl")]
    return others[0] if len(others) == 1 else None


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _may_be_tex(name: str) -> bool:
    base = posixpath.basename(name).lower()
    return base.endswith((".tex", ".ltx", ".latex", ".txt")) or "." not in base


def _readme(files: Mapping[str, str]) -> tuple[set[str], list[str]]:
    """Return (ignored files, main files) as named by `NAME ignore`, `NAME toplevelfile` in arXiv's 00README files."""
    ignored: set[str] = set()
    chosen: list[str] = []
    for readme in ("00README.XXX", "00README.json", "00README", "00readme.xxx"):
        content = files.get(readme, "")
        if readme.endswith(".json"):
            for entry in re.finditer(r"\{[^{}]*\}", content):
                name = re.search(r'"filename"\s*:\s*"([^"]+)"', entry[0])
                usage = re.search(r'"usage"\s*:\s*"([^"]+)"', entry[0])
                if name and usage and usage[1] == "toplevel":
                    chosen.append(name[1])
                elif name and usage and usage[1] == "ignore":
                    ignored.add(name[1])
            continue
        for line in content.split("\n"):
            words = line.split()
            if len(words) >= 2 and words[1] in ("ignore", "include"):
                ignored.add(words[0])
            elif len(words) >= 2 and words[1] == "toplevelfile":
                chosen.append(words[0])
    return ignored | {"00README.XXX", "00README.json", "00README", "00readme.xxx"}, chosen
