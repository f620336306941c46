"""Mail of one's own: eml files, mbox files, maildirs, CSV tables of raw messages."""

from __future__ import annotations

import re

from piledriver.corpus.sources.base import Source, ends_with
from piledriver.corpus.sources.shared.mail import mail_documents, mail_pieces

# Files of a maildir: time, a unique part, the host, and flags after a colon (or its substitutes on Windows).
_MAILDIR = re.compile(r"\d{6,}\.[^/]{1,200}|\d+[._]?|[^/]{1,200}[:;!]2,[A-Za-z]{0,20}")
_named = ends_with(".eml", ".mbox", ".mbx", ".csv")


def _wants(name: str) -> bool:
    """Return whether it is a file of mail by its ending, or named like a message of a maildir."""
    return _named(name) or _MAILDIR.fullmatch(name) is not None


SOURCE = Source(
    slug="mail",
    name="Mail",
    title="mail: one message, one document",
    raw_format=(
        "eml files, mbox files, maildirs, CSV tables with a `message` column; alone, compressed or in archives"
    ),
    licence="yours",
    consent="yours",
    treatment=(
        "The body of each message as text, plain text preferred to HTML, attachments left out, forwarded messages "
        "kept with sender, date and subject; sender, receivers, date and subject become meta."
    ),
    wants=_wants,
    pieces=mail_pieces,
    documents=mail_documents,
)
