"""Replace personal data and secrets, found by pattern, and count them by kind.

Every pattern has bounded repetitions, so its time is linear in the text, and each is tried only if a cheap search finds
a part that it requires ("@", a digit, a known prefix). Numbers are checked before they are replaced: cards by Luhn's
sum and the issuer's prefix, IP addresses by the text around them (addresses.py), telephone numbers by their shape.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from piledriver.core.errors import UsageError
from piledriver.corpus.document import Document
from piledriver.corpus.filters.addresses import is_address

_EMAIL = re.compile(
    r"(?<![\w.+-])[A-Za-z0-9](?:[\w.+-]{0,62}[\w+-])?@"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![\w-])"
)
_IPV4 = re.compile(r"(?<![\w.§-])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_CARD = re.compile(r"(?<![\w.,-])[2-6]\d{3}(?:[ -]?\d){9,12}(?![\w-]|[.,]\d)")
_PHONE = re.compile(
    # International: + and 8 to 15 digits in groups; North American: 3-3-4 with separators.
    r"(?<![\w+.])\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}(?![\w-])"
    r"|(?<![\w+.-])(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[.-])[2-9]\d{2}[.-]\d{4}(?![\w-]|\.\d)"
)
_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----[^-]{0,20000}"
    r"(?:-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----)?"
    r"|(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|(?<![A-Za-z0-9])gh[pousr]_[A-Za-z0-9]{36,255}(?![A-Za-z0-9])"
    r"|(?<![A-Za-z0-9])github_pat_[A-Za-z0-9_]{22,255}(?![A-Za-z0-9])"
    r"|(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{8,512}\.eyJ[A-Za-z0-9_-]{8,8000}\.[A-Za-z0-9_-]{16,2000}"
    r"|(?<=aws_secret_access_key)[\"' ]{0,3}[=:][\"' ]{0,3}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
)
_KEY_HINTS = ("PRIVATE KEY", "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "eyJ", "aws_secret")
_DIGIT = re.compile(r"\d")
# Issuers: American Express, Diners, JCB; Visa; Mastercard; Discover, UnionPay.
_ISSUER = re.compile(r"3[0-8]|4|5[1-5]|2[2-7]|6(?:011|2|4[4-9]|5)")

# In this order: text that one kind replaces is not seen by the next.
KINDS = ("key", "email", "card", "ip", "phone")


@dataclass(frozen=True, kw_only=True)
class Pii:
    """Replace personal data; never drop a document. `meta["replaced"]` and the manifest count the kinds.

    >>> Pii()(Document("Write to jane.doe@example.com or 93.184.216.34, not 127.0.0.1.")).text
    'Write to <EMAIL> or <IP>, not 127.0.0.1.'
    """

    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    """Which kinds to replace: key, email, card, ip, phone."""
    replacements: dict[str, str] = field(default_factory=dict)
    """What to write in place of a kind; by default <EMAIL>, <IP>, ..."""

    def __post_init__(self) -> None:
        for kind in (*self.kinds, *self.replacements):
            if kind not in KINDS:
                raise UsageError(f"pii: unknown kind {kind!r}", fix=f"choose from {', '.join(KINDS)}")

    def __call__(self, document: Document) -> Document:
        """Return the document with replacements."""
        text = document.text
        found: Counter[str] = Counter()
        for kind in KINDS:
            if kind in self.kinds:
                text = _replaced(text, kind, self.replacements.get(kind, f"<{kind.upper()}>"), found)
        if not found:
            return document
        known = document.meta.get("replaced")
        before: dict[str, int] = known if isinstance(known, dict) else {}
        counted = {**before, **{kind: before.get(kind, 0) + count for kind, count in found.items()}}
        return msgspec.structs.replace(document, text=text, meta={**document.meta, "replaced": counted})


def _replaced(text: str, kind: str, replacement: str, found: Counter[str]) -> str:
    for hint, pattern, accepts in _RULES[kind]:
        if not hint(text):
            continue
        pieces, at = [], 0
        for match in pattern.finditer(text):
            if accepts(match):
                pieces += [text[at : match.start()], replacement]
                at = match.end()
                found[kind] += 1
        text = "".join([*pieces, text[at:]])
    return text


def is_card_number(text: str) -> bool:
    """Return whether digits are a payment card number: an issuer's prefix, and Luhn's sum.

    >>> is_card_number("4111 1111 1111 1111"), is_card_number("4111 1111 1111 1112")
    (True, False)
    """
    digits = [int(character) for character in text if character.isdigit()]
    if len(set(digits)) == 1 or _ISSUER.match("".join(map(str, digits))) is None:
        return False
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _accept(_: re.Match[str]) -> bool:
    return True


def _is_address(match: re.Match[str]) -> bool:
    return is_address(match.string, *match.span())


def _has_digit(text: str) -> bool:
    return _DIGIT.search(text) is not None


_Rule = tuple[Callable[[str], bool], re.Pattern[str], Callable[[re.Match[str]], bool]]
_RULES: dict[str, tuple[_Rule, ...]] = {
    "key": ((lambda text: any(hint in text for hint in _KEY_HINTS), _KEY, _accept),),
    "email": ((lambda text: "@" in text, _EMAIL, _accept),),
    "card": ((_has_digit, _CARD, lambda match: is_card_number(match.group())),),
    "ip": ((_has_digit, _IPV4, _is_address), (lambda text: ":" in text, _IPV6, _is_address)),
    "phone": ((_has_digit, _PHONE, lambda match: 8 <= sum(map(str.isdigit, match.group())) <= 15),),
}
