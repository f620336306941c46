"""Mail and the Enron corpus: messages in every packing, one rule a test."""

from __future__ import annotations

import base64
import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.sources.shared.mail import read_message
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

SIMPLE = b"""Message-ID: <1@x>
Date: Mon, 14 May 2001 16:39:00 -0700 (PDT)
From: a@enron.com
To: b@enron.com,
\tc@enron.com
Subject: =?utf-8?q?caf=C3=A9?=
Content-Type: text/plain; charset=us-ascii

Hello

 there
"""


def body(raw: bytes) -> str:
    found = read_message(raw, "x")
    return getattr(found, "text", "") or f"refused: {getattr(found, 'reason', '')}"


def test_the_body_is_the_text_and_the_headers_are_meta() -> None:
    documents, refusals = extract_bytes("mail", "a.eml", SIMPLE)
    assert refusals == []
    assert documents[0].text == "Hello\n\n there"
    meta = documents[0].meta
    assert meta["subject"] == "café"
    assert meta["to"] == "b@enron.com, c@enron.com"
    assert meta["date"] == "2001-05-14T16:39:00-07:00"


PLAIN_AND_HTML = b"""Content-Type: multipart/mixed; boundary="out"

preamble
--out
Content-Type: multipart/alternative; boundary=in

--in
Content-Type: text/html

<p>rich</p>
--in
Content-Type: text/plain

plain
--in--
--out
Content-Type: text/plain
Content-Disposition: attachment; filename=x.txt

secret
--out
Content-Type: message/rfc822

From: d@x
Subject: inner

forwarded words
--out--
epilogue
"""

RULES = {
    "plain is preferred, attachments go, messages inside stay": (
        PLAIN_AND_HTML,
        "plain\n\nFrom: d@x\nSubject: inner\n\nforwarded words",
    ),
    "html alone": (b"Content-Type: text/html\n\n<html><body><p>Hi &amp; bye</p></body></html>", "Hi & bye"),
    "html that says it is plain": (b"From: a\n\n<html><body>Hi</body></html>", "Hi"),
    "quoted-printable": (
        b"Content-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable\n\n"
        b"caf=E9 =\nau lait",
        "café au lait",
    ),
    "base64": (b"Content-Transfer-Encoding: base64\nX: y\n\n" + base64.b64encode("grün".encode()), "grün"),
    "base64 cut short": (b"Content-Transfer-Encoding: base64\n\n" + base64.b64encode(b"hello world")[:-3], "hello wor"),
    "declared encoding": (b"Content-Type: text/plain; charset=koi8-r\n\n" + "привет".encode("koi8-r"), "привет"),
    "unknown encoding": (b"Content-Type: text/plain; charset=x-none\n\nna\xefve", "naïve"),
    "lost declaration of quoted-printable": (b"From: a\n\none=20\ntwo =\nthree=2E\n", "one \ntwo three."),
    "an equals sign is no encoding": (b"From: a\n\nx =20 and y=\nz", "x =20 and y=\nz"),
    "flowed": (b"Content-Type: text/plain; format=flowed\n\none \ntwo\n> q \nthree", "one two\n> q \nthree"),
    "uuencoded": (b"From: a\n\nsee\nbegin 644 a.bin\n#86)C\n`\nend\nbye", "see\nbye"),
    "windows line ends": (b"From: a\r\nTo: b\r\n\r\nx\r\ny", "x\ny"),
    "no words": (b"From: a\n\n \n", "refused: no text in the body"),
    "no headers": (b"just words here\nand more", "refused: not a message"),
    "boundary never comes": (b"Content-Type: multipart/mixed; boundary=q\n\nwords", "words"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    raw, text = RULES[rule]
    assert body(raw) == text


MBOX = b"From a@x Mon Jan  1 00:00:00 2001\nFrom: a\n\none\n>From you\n\nFrom here on it is text\n\n"
MBOX += b"From b@x Tue Jan  2 10:00:00 2001\nFrom: b\n\ntwo\n"


def test_mbox_is_cut_at_its_separators() -> None:
    documents, refusals = extract_bytes("mail", "in.mbox", MBOX)
    assert [document.text for document in documents] == ["one\nFrom you\n\nFrom here on it is text", "two"]
    assert [document.meta["origin"] for document in documents] == ["in.mbox#0", "in.mbox#1"]
    assert refusals == []


def test_mbox_gives_the_same_for_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    many = MBOX * 30
    whole, _ = extract_bytes("mail", "in.mbox", many)
    monkeypatch.setattr("piledriver.corpus.sources.shared.mail.MBOX_BATCH_BYTES", 50)
    cut, _ = extract_bytes("mail", "in.mbox", many)
    assert [(d.text, d.meta["origin"]) for d in cut] == [(d.text, d.meta["origin"]) for d in whole]


def test_csv_of_raw_messages() -> None:
    row = '"allen-p/1.","' + SIMPLE.decode().replace('"', '""') + '"\n'
    documents, _ = extract_bytes("enron-emails", "emails.csv", b'"file","message"\n' + row.encode() * 2)
    assert [document.text for document in documents] == ["Hello\n\n there"] * 2
    assert documents[0].meta["origin"] == "emails.csv#allen-p/1."


def test_a_maildir_in_a_tar() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in (("maildir/a/inbox/1.", SIMPLE), ("maildir/a/inbox/2.", b""), ("maildir/note.doc", b"x")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    documents, refusals = extract_bytes("enron-emails", "enron.tar.gz", packed.getvalue())
    assert [document.meta["origin"] for document in documents] == ["enron.tar.gz!maildir/a/inbox/1."]
    assert [refusal.reason for refusal in refusals] == ["not a message"]


@given(st.binary(max_size=200), st.integers(0, len(PLAIN_AND_HTML)), st.integers(0, 60))
@settings(max_examples=150)
def test_damage_never_gets_out(noise: bytes, at: int, cut: int) -> None:
    assert read_message(PLAIN_AND_HTML[:at] + noise + PLAIN_AND_HTML[at + cut :], "x") is not None


def test_parts_in_parts_without_end() -> None:
    nested = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (i, i) for i in range(5000))
    assert body(nested + b"\nwords").startswith("refused")


@pytest.mark.skipif(not (SAMPLES / "enron-emails").exists(), reason="the shared raw samples are not here")
def test_samples() -> None:
    documents, refusals = extract_paths("enron-emails", SAMPLES / "enron-emails")
    assert refusals == []
    assert len(documents) == 21
    by_file = {d.meta["origin"]: d.text for d in documents}
    in_table = by_file["enron-emails/3_one_forwarded_example.csv#allen-p/_sent_mail/102."]
    assert in_table == by_file["enron-emails/maildir/allen-p/_sent_mail/102_"]
    assert in_table.startswith("---------------------- Forwarded by Phillip K Allen/HOU/ECT")


def test_frames_of_signatures_and_archives_are_no_text() -> None:
    signed = (
        b"Subject: s\n\n-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA1\n\nSigned text.\n- -- dash\n"
        b"-----BEGIN PGP SIGNATURE-----\nVersion: GnuPG\n\niEYEAR\n-----END PGP SIGNATURE-----\n_____\nlist foot\n"
    )
    assert body(signed) == "Signed text.\n-- dash\n_____\nlist foot"
    # An answer that quotes a frame is left alone.
    assert body(b"Subject: s\n\n> -----BEGIN PGP SIGNED MESSAGE-----\nYes.\n").endswith("Yes.")
    scrubbed = b"Subject: s\n\nHi.\n-------------- next part --------------\nA non-text attachment was scrubbed...\n"
    assert body(scrubbed + b"Name: a.png\nURL: <http://x/a>\n") == "Hi."


def test_what_a_mail_program_keeps_in_its_folder_is_no_message() -> None:
    content = (
        b"From a Thu Jan  1 00:00:00 1998\nSubject: DON'T DELETE THIS MESSAGE -- FOLDER INTERNAL DATA\n\nThis text\n"
    )
    documents, refusals = extract_bytes("mail", "a.mbox", content)
    assert (documents, [refusal.reason for refusal in refusals]) == ([], ["folder data"])
