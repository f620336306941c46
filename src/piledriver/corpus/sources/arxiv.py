"""ArXiv: papers from their LaTeX sources."""

from __future__ import annotations

import gzip
import io
import os
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.latex import gather_inputs, latex_to_text, main_files
from piledriver.corpus.formats.latex.comments import Aside
from piledriver.corpus.raw.limits import damage_refusal, read_all
from piledriver.corpus.raw.partial_reads import DAMAGE
from piledriver.corpus.raw.streams import RawStream, archive_kind
from piledriver.corpus.sources.base import Found, Piece, Source, one_piece, stop_at_damage
from piledriver.corpus.text.normalise import NotTextError, decode_text, is_binary

MAX_TEXT_BYTES = 1 << 26
MAX_FILES = 5_000
_TEX_NAMES = (".tex", ".ltx", ".latex", ".bbl", ".sty", ".txt", ".xxx", ".json", ".def")
_NOT_TEXT = str.split(
    ".eps .ps .pdf .png .jpg .jpeg .gif .svg .tif .tiff .bmp .zip .gz .cls .bst .bib .dat .csv .fig .mp4 .avi .mov .wav"
    " .mp3 .h5 .npy .mat .py .ipynb .xlsx .docx .pfb .tfm .vf .pl .c .cpp .h .aux .log .out .toc .blg .html .xml .anc"
)
_NEW_ID = re.compile(r"(?<!\d)(\d{4}\.\d{4,5})(v\d+)?(?!\d)")
# What arXiv calls a submission that it serves: its number, without an ending.
_BARE_ID = re.compile(r"\d{4}\.\d{4,5}(?:v\d{1,2})?|[a-z-]{2,12}(?:\.[A-Z]{2})?\d{7}(?:v\d{1,2})?")
_OLD_ID = re.compile(r"([a-z]+(?:-[a-z]+)?(?:\.[A-Z]{2})?)/?(\d{7})(?!\d)")
_INPUT_ENCODING = re.compile(rb"\\usepackage\s*\[([a-z0-9-]{2,12})\]\s*\{inputenc\}")
_ENCODINGS = {
    "latin1": "latin-1", "latin2": "latin2", "latin9": "iso8859-15", "ansinew": "cp1252", "cp1252": "cp1252",
    "applemac": "mac_roman", "cp1250": "cp1250", "cp1251": "cp1251", "koi8-r": "koi8-r", "utf8": "utf-8",
}  # fmt: skip
_WITHDRAWN = re.compile(r"\b(?:has been|is|was) (?:temporarily )?withdrawn\b|\\begin\{withdrawn\}", re.IGNORECASE)


def _pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Yield each submission as a piece: a file of arXiv, or the TeX files of one folder or unpacked archive."""
    group: list[tuple[str, str | bytes]] = []
    home, size = "", 0
    for stream in streams:
        own = _home(stream.origin) if stream.name.lower().endswith(_TEX_NAMES) else ""
        if group and own != home:
            yield Piece(home, extra=group)
            group, size = [], 0
        if not own:
            yield from stop_at_damage(stream.origin, one_piece(stream, as_stored=True))
            continue
        home = own
        # Members may be named `./paper.tex`; files refer to each other without the `./`.
        name = posixpath.normpath(stream.origin if home == "." else stream.origin[len(home) + 1 :])
        if stream.path is not None:
            group.append((name, stream.path))
            continue
        try:
            content = read_all(stream.file, MAX_TEXT_BYTES - size, "the TeX files of one archive")
        except DAMAGE as error:
            yield damage_refusal(stream.origin, error)
            continue
        size += len(content)
        group.append((name, content))
    if group:
        yield Piece(home, extra=group)


def _home(origin: str) -> str:
    """Return the archive of a file, or its folder."""
    archive, mark, _ = origin.rpartition("!")
    return archive if mark else os.path.dirname(origin) or "."


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield the paper of a submission; of a folder of TeX files, each paper in it."""
    if piece.extra is not None:
        files: dict[str, str] = {}
        for name, where in piece.extra:
            try:
                files[name] = _text(_content(where))
            except NotTextError as error:
                yield Refusal(error.reason, f"{piece.origin} {name}")
        mains = main_files(files)
        if not mains:
            yield Refusal("no tex", piece.origin)
            return
        in_folder = any(isinstance(where, str) for _, where in piece.extra)
        separator = "/" if in_folder else "!"
        for group in [[main] for main in mains] if in_folder else [mains]:
            origin = f"{piece.origin}{separator}{group[0]}" if piece.origin != "." else group[0]
            yield _paper(files, group, origin)
        return
    found = _files(piece)
    if isinstance(found, Refusal):
        yield found
        return
    mains = main_files(found)
    yield _paper(found, mains, piece.origin) if mains else Refusal("no tex", piece.origin)


def _content(where: str | bytes) -> bytes:
    if isinstance(where, bytes):
        return where
    with open(where, "rb") as file:
        return file.read(MAX_TEXT_BYTES)


def _files(piece: Piece) -> dict[str, str] | Refusal:
    """Return the text files of a submission by name, or the refusal."""
    try:
        content = piece.read()
    except (OSError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        return Refusal("damaged archive", piece.origin, str(error))
    if refusal := _not_tex(content[:4096], piece.origin):
        return refusal
    if content[257:262] != b"ustar" and not _looks_like_old_tar(content):
        name = os.path.basename(piece.origin).removesuffix(".gz")
        text = _text(content)
        if _is_withdrawn(text):
            return Refusal("withdrawn", piece.origin)
        return {name if name.endswith(".tex") else f"{name}.tex": text}
    files: dict[str, str] = {}
    left = MAX_TEXT_BYTES
    kinds: set[str] = set()
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for entry in archive:
                extension = os.path.splitext(entry.name)[1].lower()
                if not entry.isreg() or len(files) >= MAX_FILES:
                    continue
                kinds.add(extension)
                if extension in _NOT_TEXT or entry.size > left:
                    continue
                member = archive.extractfile(entry)
                raw = member.read() if member is not None else b""
                if _not_tex(raw[:1024], "") is None and not is_binary(raw):
                    files[posixpath.normpath(entry.name)] = _text(raw)
                    left -= len(raw)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        if not files:
            return Refusal("damaged archive", piece.origin, str(error))
    if not files or not main_files(files):
        return Refusal("pdf only" if ".pdf" in kinds else "no tex", piece.origin)
    if len(files) == 1 and _is_withdrawn(next(iter(files.values()))):
        return Refusal("withdrawn", piece.origin)
    return files


def _not_tex(head: bytes, origin: str) -> Refusal | None:
    for mark, reason in (
        (b"%PDF", "pdf only"),
        (b"%!PS", "postscript only"),
        (b"PK\x03\x04", "not latex"),
        (b"\x04%!", "postscript only"),
    ):
        if head.startswith(mark):
            return Refusal(reason, origin)
    stripped = head.lstrip()[:20].lower()
    return Refusal("not latex", origin, "an html page") if stripped.startswith((b"<!doctype", b"<html")) else None


def _looks_like_old_tar(content: bytes) -> bool:
    return (
        len(content) >= 512
        and content[156:157] in (b"0", b"5", b"\x00")
        and content[100:107].strip(b" 0123456789\x00") == b""
        and b"\x00" in content[:100]
    )


def _is_withdrawn(text: str) -> bool:
    # arXiv replaces a withdrawn paper by a short notice that is not typeset.
    if len(text) >= 3000 or "\\section" in text:
        return False
    return "%auto-ignore" in text[:200] or _WITHDRAWN.search(text) is not None


def _text(content: bytes) -> str:
    declared = _INPUT_ENCODING.search(content[:20_000])
    return decode_text(content, _ENCODINGS.get(declared[1].decode("ascii")) if declared else None)


def _paper(files: dict[str, str], mains: list[str], origin: str) -> Found:
    texts = []
    for main in mains[:8]:
        aside = Aside(files.values())
        if text := latex_to_text(gather_inputs(files, main, aside), aside).strip():
            texts.append(text)
    if not texts:
        return Refusal("no text", origin)
    meta: dict[str, Any] = {"origin": origin}
    if identifier := arxiv_id(origin):
        meta["arxiv_id"] = identifier
        meta["url"] = f"https://arxiv.org/abs/{identifier}"
    if texts[0].startswith("# "):
        meta["title"] = texts[0].split("\n", 1)[0].removeprefix("# ")
    return Document("\n\n".join(texts), meta=meta)


def arxiv_id(origin: str) -> str | None:
    """Return the identifier in a file name, of either scheme, or `None`.

    >>> arxiv_id("arXiv_src_1911_012.tar!1911/1911.02782.gz"), arxiv_id("x.tar!0001/astro-ph0001001.gz")
    ('1911.02782', 'astro-ph/0001001')
    """
    name = os.path.basename(origin.rpartition("!")[2] or origin)
    if found := _NEW_ID.search(name):
        return found[1]
    found = _OLD_ID.search(name)
    return f"{found[1]}/{found[2]}" if found else None


def _wants(name: str) -> bool:
    """Return whether it is a submission (`.gz`, `.tar.gz`) or a TeX file; bulk tars are opened as archives."""
    lowered = name.lower()
    if lowered.endswith((".tar.gz", ".tgz")):
        return not lowered.startswith("arxiv_src")
    if lowered.endswith(".pdf"):
        # A PDF named by an identifier is a submission, any other a figure.
        return arxiv_id(name) is not None
    if _BARE_ID.fullmatch(name):
        return True
    return lowered.endswith((".gz", ".tex", ".ltx", ".latex", ".bbl", ".sty")) and archive_kind(name) is None


SOURCE = Source(
    slug="arxiv",
    name="ArXiv",
    title="papers of arXiv from their LaTeX sources",
    raw_format="submissions as arXiv serves them (.gz of one TeX file, .tar.gz), arXiv_src_*.tar of those, TeX folders",
    licence="mixed, per paper; most under arXiv's licence to distribute",
    consent="author",
    treatment=(
        "A submission is a document: the main file is found, its inputs are resolved inside the archive only, comments "
        "go, the authors' macros are expanded (with a budget), and our own converter writes title, abstract, `#` "
        "headings, lists, pipe tables, captions, theorems, footnotes, code and the bibliography; formulas stay LaTeX "
        "between `$` and `$$`; citations and references are printed as LaTeX prints them. Author blocks are left out. "
        "Unlike the original (pandoc) title and abstract are kept and a paper with an odd macro is not thrown away. "
        "Refused: PDF- or PostScript-only submissions, withdrawn papers, damaged archives."
    ),
    wants=_wants,
    pieces=_pieces,
    documents=_documents,
    citation="https://info.arxiv.org/help/bulk_data_s3.html",
)
