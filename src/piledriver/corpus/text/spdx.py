"""SPDX ids of licence texts, recognised by phrases that only one licence has (`spdx.yaml`).

Licence files differ in names, years, line breaks and quotation marks, so only words are compared.
"""

from __future__ import annotations

import re

from piledriver.corpus.text.data_table import data_table

MAX_LICENCE_BYTES = 1 << 18
_LICENCE_CHARACTERS = 2500

_WORDS = re.compile(r"[a-z0-9.]+")
_FILE = re.compile(r"(?:un)?licen[cs]e|copying|copyright|legal|eula", re.IGNORECASE)
_HEADER = re.compile(
    r"SPDX-License-Identifier:[ \t]*\(?([A-Za-z0-9.+-]+(?:[ \t]+(?:AND|OR|WITH)[ \t]+[A-Za-z0-9.+-]+){0,4})"
)

_LICENCES: list[dict[str, str]] = data_table(__package__, "spdx.yaml")


def is_licence_file(name: str) -> bool:
    """Return whether a file at the root of a repository holds a licence, by its name.

    >>> is_licence_file("LICENSE.txt"), is_licence_file("COPYING"), is_licence_file("main.c")
    (True, True, False)
    """
    return _FILE.match(name) is not None and not name.lower().endswith(
        (".py", ".c", ".js", ".ts", ".go", ".rs", ".java")
    )


def spdx_id(text: str) -> str | None:
    """Return the SPDX id of a licence text, or `None` for an unknown licence.

    >>> spdx_id("GNU GENERAL PUBLIC LICENSE\\n   Version 3, 29 June 2007")
    'GPL-3.0'
    """
    header = spdx_header(text)
    if header is not None:
        return header
    words = " ".join(_WORDS.findall(text[:MAX_LICENCE_BYTES].lower().replace("-", " ")))
    # Some copies end a sentence with a full stop where others do not; "2.0." is a number and a full stop.
    words = words.replace(". ", " ").removesuffix(".")
    best: tuple[int, str] | None = None
    for licence in _LICENCES:
        at = words.find(licence["phrase"])
        # The first licence of a file is its own: later ones are mentioned, or cover parts of the repository.
        if at < 0 or (best is not None and best[0] <= at):
            continue
        window = words[at : at + _LICENCE_CHARACTERS]
        if licence.get("needs", "") in window and not ("lacks" in licence and licence["lacks"] in window):
            best = (at, licence["id"])
    return best[1] if best is not None else None


def spdx_header(text: str) -> str | None:
    """Return the licence expression of the `SPDX-License-Identifier` line of a file, or `None`.

    >>> spdx_header("// SPDX-License-Identifier: MIT OR Apache-2.0\\nint main;")
    'MIT OR Apache-2.0'
    """
    found = _HEADER.search(text[:4096]) if "SPDX" in text[:4096] else None
    return " ".join(found.group(1).split()) if found else None
