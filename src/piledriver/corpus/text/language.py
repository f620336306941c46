"""Detect the language of a text."""

from __future__ import annotations

from piledriver.core.lazy import import_optional

# More characters do not change the result.
_ENOUGH_CHARACTERS = 10_000


def language_of(text: str) -> str | None:
    """Return the ISO code of the language of most of a text, or `None` where the detector is not sure.

    >>> language_of("The quick brown fox jumps over the lazy dog, and then it rests.")
    'en'
    """
    pycld2 = import_optional("pycld2", extra="corpus", purpose="telling languages apart")
    sample = text[:_ENOUGH_CHARACTERS].encode("utf-8", "ignore")
    try:
        _, _, found = pycld2.detect(sample)
    except pycld2.error:
        # It rejects unprintable characters.
        printable = "".join(character for character in text[:_ENOUGH_CHARACTERS] if character.isprintable())
        try:
            _, _, found = pycld2.detect(printable.encode("utf-8", "ignore"))
        except pycld2.error:
            return None
    code: str = found[0][1]
    return None if code == "un" else code
