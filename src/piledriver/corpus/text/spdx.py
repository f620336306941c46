"""Which licence is this text? SPDX ids by the sentences that only one licence has.

Licence files differ in names, years, line breaks and quotation marks, so that words alone are compared. A licence is
recognised by phrases that all its copies hold; of several in one file the first in it counts, and of those that start
alike the first in the table.
"""

from __future__ import annotations

import re

MAX_LICENCE_BYTES = 1 << 18
_LICENCE_CHARACTERS = 2500

_WORDS = re.compile(r"[a-z0-9.]+")
_FILE = re.compile(r"(?:un)?licen[cs]e|copying|copyright|legal|eula", re.IGNORECASE)
_HEADER = re.compile(
    r"SPDX-License-Identifier:[ \t]*\(?([A-Za-z0-9.+-]+(?:[ \t]+(?:AND|OR|WITH)[ \t]+[A-Za-z0-9.+-]+){0,4})"
)

_PERMISSION = "permission is hereby granted free of charge to any person obtaining a copy"
_BSD = "redistribution and use in source and binary forms with or without modification are permitted"
_ISC = "distribute this software for any purpose with or without fee is hereby granted"
_POSTGRES = "for any purpose without fee and without a written agreement is hereby granted"
_RUBY = "you may make and give away verbatim copies of the source form of the software without restriction"
_GNU = "gnu general public license"

# (id, phrases that must be there, phrases that must not)
_TABLE: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("AGPL-3.0", ("gnu affero general public license version 3",), ()),
    ("LGPL-3.0", ("gnu lesser general public license version 3",), ()),
    ("LGPL-2.1", ("gnu lesser general public license version 2.1",), ()),
    ("LGPL-2.0", ("gnu library general public license version 2",), ()),
    ("GPL-3.0", (f"{_GNU} version 3",), ()),
    ("GPL-2.0", (f"{_GNU} version 2",), ()),
    ("GPL-1.0", (f"{_GNU} version 1",), ()),
    ("Apache-2.0", ("apache license version 2.0",), ()),
    ("Apache-2.0", ("licensed under the apache license version 2.0",), ()),
    ("Apache-1.1", ("apache software license version 1.1",), ()),
    ("MPL-2.0", ("mozilla public license version 2.0",), ()),
    ("MPL-2.0", ("mozilla public license v 2.0",), ()),
    ("MPL-1.1", ("mozilla public license version 1.1",), ()),
    ("EPL-2.0", ("eclipse public license v 2.0",), ()),
    ("EPL-1.0", ("eclipse public license v 1.0",), ()),
    ("EUPL-1.2", ("european union public licence v 1.2",), ()),
    ("EUPL-1.1", ("european union public licence v 1.1",), ()),
    ("CDDL-1.0", ("common development and distribution license cddl version 1.0",), ()),
    ("OSL-3.0", ("open software license v 3.0",), ()),
    ("OFL-1.1", ("sil open font license version 1.1",), ()),
    ("Artistic-2.0", ("artistic license 2.0",), ()),
    ("Artistic-1.0-Perl", ("the artistic license", "standard version refers to"), ()),
    ("BSL-1.0", ("boost software license version 1.0",), ()),
    ("BUSL-1.1", ("business source license 1.1",), ()),
    ("SSPL-1.0", ("server side public license",), ()),
    ("Elastic-2.0", ("elastic license 2.0",), ()),
    ("CC-BY-NC-SA-4.0", ("attribution noncommercial sharealike 4.0 international",), ()),
    ("CC-BY-NC-ND-4.0", ("attribution noncommercial noderivatives 4.0 international",), ()),
    ("CC-BY-NC-4.0", ("attribution noncommercial 4.0 international",), ()),
    ("CC-BY-ND-4.0", ("attribution noderivatives 4.0 international",), ()),
    ("CC-BY-SA-4.0", ("attribution sharealike 4.0 international",), ()),
    ("CC-BY-4.0", ("attribution 4.0 international",), ()),
    ("CC-BY-SA-3.0", ("attribution sharealike 3.0",), ()),
    ("CC-BY-3.0", ("attribution 3.0",), ()),
    ("CC0-1.0", ("cc0 1.0 universal",), ()),
    ("Unlicense", ("this is free and unencumbered software released into the public domain",), ()),
    ("WTFPL", ("do what the fuck you want to public license",), ()),
    ("PSF-2.0", ("python software foundation license version 2",), ()),
    ("Ruby", (_RUBY,), ()),
    ("PostgreSQL", ("postgresql license",), ()),
    ("PostgreSQL", (_POSTGRES,), ()),
    ("MIT-CMU", ("software and its associated documentation for any purpose and without fee is hereby granted",), ()),
    ("HPND", ("software and its documentation for any purpose and without fee is hereby granted",), ()),
    ("ZPL-2.1", ("zope public license zpl version 2.1",), ()),
    ("NCSA", ("university of illinois ncsa open source license",), ()),
    ("Zlib", ("altered source versions must be plainly marked",), ()),
    ("X11", (_PERMISSION, "the name of the x consortium shall not be used"), ()),
    ("MIT-0", (_PERMISSION,), ("the above copyright notice and this permission notice",)),
    ("MIT", (_PERMISSION, "the above copyright notice and this permission notice"), ()),
    ("MIT", ("the mit license",), ()),
    ("BSD-4-Clause", (_BSD, "all advertising materials mentioning features"), ()),
    ("BSD-3-Clause-Clear", (_BSD, "no express or implied licenses to any party"), ()),
    ("BSD-3-Clause", (_BSD, "endorse or promote products"), ()),
    ("BSD-1-Clause", (_BSD,), ("in binary form must reproduce",)),
    ("BSD-2-Clause", (_BSD,), ()),
    ("0BSD", (_ISC,), ("the above copyright notice",)),
    ("ISC", (_ISC,), ()),
    ("blessing", ("may you do good and not evil",), ()),
    ("public-domain", ("dedicated to the public domain",), ()),
    ("public-domain", ("released into the public domain",), ()),
    ("public-domain", ("in the public domain",), ()),
)  # fmt: skip


def is_licence_file(name: str) -> bool:
    """Whether a file at the root of a repository is where a licence stands.

    >>> is_licence_file("LICENSE.txt"), is_licence_file("COPYING"), is_licence_file("main.c")
    (True, True, False)
    """
    return _FILE.match(name) is not None and not name.lower().endswith(
        (".py", ".c", ".js", ".ts", ".go", ".rs", ".java")
    )


def spdx_id(text: str) -> str | None:
    """The id of a licence by its text, or None where it is none that we know.

    >>> spdx_id("GNU GENERAL PUBLIC LICENSE\\n   Version 3, 29 June 2007")
    'GPL-3.0'
    """
    header = spdx_header(text)
    if header is not None:
        return header
    words = " ".join(_WORDS.findall(text[:MAX_LICENCE_BYTES].lower().replace("-", " ")))
    # Sentences end where others have no stop; "2.0." is a number and a stop.
    words = words.replace(". ", " ").removesuffix(".")
    best: tuple[int, str] | None = None
    for name, needed, forbidden in _TABLE:
        at = words.find(needed[0])
        # What a file says first is what it is: others may be named further down, or be those of parts that it contains.
        if at < 0 or (best is not None and best[0] <= at):
            continue
        window = words[at : at + _LICENCE_CHARACTERS]
        if all(phrase in window for phrase in needed) and not any(phrase in window for phrase in forbidden):
            best = (at, name)
    return best[1] if best is not None else None


def spdx_header(text: str) -> str | None:
    """What a file says about itself in the line that SPDX asks for.

    >>> spdx_header("// SPDX-License-Identifier: MIT OR Apache-2.0\\nint main;")
    'MIT OR Apache-2.0'
    """
    found = _HEADER.search(text[:4096]) if "SPDX" in text[:4096] else None
    return " ".join(found.group(1).split()) if found else None
