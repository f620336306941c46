"""The rules of The Pile for files of a source tree, by name and by content: only code that people wrote is taken."""

from __future__ import annotations

from piledriver.corpus.text.data_table import data_table, word_set
from piledriver.corpus.text.normalise import NotTextError, decode_text, is_binary

MAX_CHARACTERS = 100_000
MAX_BYTES = 4 * MAX_CHARACTERS
MAX_DIGIT_SHARE = 0.8
MAX_MEAN_LINE = 200

_TABLES = data_table(__package__, "rules.yaml")
_DATA_ENDINGS = word_set(_TABLES["data_endings"])
_LANGUAGES: dict[str, str] = _TABLES["languages"]
_NAMES: dict[str, str] = _TABLES["names"]


def why_not_by_name(path: str) -> str | None:
    """Return why a file is rejected by its path inside the repository, or `None`.

    >>> why_not_by_name("src/.env"), why_not_by_name("web/jquery.min.js"), why_not_by_name("src/a.c")
    ('hidden file', 'minified or installed file', None)
    """
    parts = path.split("/")
    name = parts[-1]
    if any(part.startswith(".") or ".git" in part for part in parts):
        return "hidden file"
    if "LICENSE" in name.upper():
        return "licence file"
    if ".min." in name or "node_modules" in parts:
        return "minified or installed file"
    if "." in name and name.rpartition(".")[2].lower() in _DATA_ENDINGS:
        return "data by its ending"
    return None


def code_text(content: bytes) -> tuple[str, str | None]:
    """Return the text of a file, and why it is rejected or `None`."""
    if not content.strip():
        return "", "empty file"
    if len(content) > MAX_BYTES:
        return "", "not text" if is_binary(content) else "100000 characters or more"
    try:
        text = decode_text(content)
    except NotTextError as error:
        return "", error.reason
    if len(text) >= MAX_CHARACTERS:
        return text, "100000 characters or more"
    if text.count("\ufffd") * 50 > len(text):
        return text, NotTextError.reason
    if sum(map(text.count, "0123456789")) > MAX_DIGIT_SHARE * len(text):
        return text, "mostly digits"
    if len(text) > MAX_MEAN_LINE * (text.count("\n") + (not text.endswith("\n"))):
        return text, "lines too long on average"
    return text, None


def programming_language(path: str) -> str | None:
    """Return the programming language by the name of the file, or `None`."""
    name = path.rpartition("/")[2].lower()
    return _NAMES.get(name) or (_LANGUAGES.get(name.rpartition(".")[2]) if "." in name else None)
