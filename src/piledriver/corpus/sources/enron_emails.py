"""Enron emails: the CMU maildir, mbox files, or the CSV of raw messages."""

from __future__ import annotations

import re

from piledriver.corpus.sources.base import Source, ends_with
from piledriver.corpus.sources.shared.mail import mail_documents, mail_pieces

_NUMBERED = re.compile(r"\d+[._]?")
_named = ends_with(".csv", ".mbox", ".mbx", ".eml")


def _wants(name: str) -> bool:
    """Return whether it is a message of the maildir (`1.`, `2.`, ...) or a file of messages."""
    return _NUMBERED.fullmatch(name) is not None or _named(name)


SOURCE = Source(
    slug="enron-emails",
    name="Enron Emails",
    title="mail of the Enron corporation, published by the US energy regulator",
    raw_format="the CMU maildir (enron_mail_*.tar.gz or unpacked), mbox, or a CSV with the raw message in a column",
    licence="public record (personal data; its authors were not asked)",
    consent="terms",
    treatment=(
        "One message is one document: the body only, as in the original, with sender, receivers, date, subject, "
        "folder and message id as meta. Plain text is preferred to HTML; attachments and uuencoded files are left "
        "out; messages inside messages keep sender, date and subject. Transfer encodings are removed as declared, and "
        "quoted-printable that lost its declaration is repaired. Forwarded and quoted text is kept. Messages without "
        "text are refused."
    ),
    citation="Klimt and Yang, The Enron Corpus, ECML 2004; https://www.cs.cmu.edu/~enron/",
    wants=_wants,
    pieces=mail_pieces,
    documents=mail_documents,
)
