"""Convert `[[...]]` to text: the label, or nothing for pictures, categories and other languages."""

from __future__ import annotations

import re

from piledriver.corpus.formats.wikitext.marks import VANISHED
from piledriver.corpus.formats.wikitext.site import LANGUAGES, SISTERS, Site

_DISAMBIGUATION = re.compile(r"\s*\([^()]*\)\s*$|,.*$")


def link_to_text(parts: list[str], site: Site) -> str:
    """Return what a reader sees of a link.

    >>> link_to_text(["Barack Obama", "Obama"], Site()), link_to_text(["Category:Dogs"], Site())
    ('Obama', '\\x02')
    """
    target = parts[0].strip()
    prefix, colon, rest = target.partition(":")
    if colon:
        if not prefix:
            # `[[:Category:Dogs]]` is a link that shows, unlike `[[Category:Dogs]]`.
            prefix, colon, rest = rest.partition(":")
            target = f"{prefix}{colon}{rest}".strip()
            if len(parts) == 1 and prefix.strip().lower() in LANGUAGES | SISTERS:
                return rest.strip()
        else:
            name = prefix.strip().replace("_", " ").lower()
            if name in site.file_names or name in site.category_names:
                return VANISHED
            if name in LANGUAGES and name != site.language and rest:
                return VANISHED
            if name in ("http", "https", "ftp"):
                _, _, label = "|".join(parts).partition(" ")
                return label.strip() or VANISHED
            if name in SISTERS and len(parts) == 1:
                return rest.strip()
    if len(parts) == 1:
        return target.replace("_", " ") if " " not in target else target
    label = "|".join(parts[1:]) if len(parts) > 2 else parts[1]
    if not label.strip():
        return _DISAMBIGUATION.sub("", rest.strip() if colon else target)
    return label
