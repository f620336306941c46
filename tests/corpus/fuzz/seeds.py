"""A few valid raw inputs for every source, in every container that it comes in: what is mutated."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

import zstandard

from tests.corpus.fuzz.law import Raw
from tests.corpus.sources import (
    test_arxiv,
    test_epub,
    test_europarl,
    test_mail,
    test_pdf,
    test_philpapers,
    test_pile_cc,
    test_pubmed_abstracts,
    test_pubmed_central,
    test_stackexchange,
    test_subtitles,
    test_ubuntu_irc,
    test_uspto_backgrounds,
    test_wikipedia_en,
)

WORDS = "The people of this town have always been of the opinion that it rains. "
HTML = (
    f"<html lang=en><head><title>T</title><meta charset=utf-8></head><body><nav>a</nav><h1>Head</h1><p>{WORDS * 3}<b>x"
    "</b> &amp; <a href='u'>y</a></p><ul><li>one<li>two</ul><table><tr><th>a<td>b</table><pre><code>x = 1\n</code>"
    "</pre><blockquote>q</blockquote><math><mi>x</mi><mo>=</mo><mn>1</mn></math><script>no</script></body></html>"
).encode()
MARKDOWN = (
    b"---\ntitle: T\n---\n# Head\n\nSome *text* [a](b).\n\n```py\nx = 1\n```\n\n- a\n  - b\n\n| a | b |\n|---|---|\n"
)
TEX = test_arxiv.paper(
    r"\section{One}\label{s} Text \emph{a} $x^2$ \cite{k}, see \ref{s}. \begin{itemize}\item a\item b\end{itemize}"
    r"\begin{equation}y=\m{1}\label{e}\end{equation}\begin{tabular}{l|r}a & b\\ \hline c & d\end{tabular}"
    r"\begin{thebibliography}{9}\bibitem{k} Knuth.\end{thebibliography}",
    r"\newcommand{\m}[1]{#1^2}\title{T}\author{A}",
).encode()
GUTENBERG = (
    "The Project Gutenberg EBook of X\n\nTitle: X\nLanguage: English\n\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***"
    f"\n\nCHAPTER I\n\n{WORDS * 4}\n\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***\nlicence\n"
).encode()
ITEMS = [
    {
        "id": 1,
        "type": "story",
        "title": "T",
        "by": "a",
        "score": 3,
        "descendants": 2,
        "kids": [2],
        "time": 1_400_000_000,
    },
    {"id": 2, "type": "comment", "parent": 1, "by": "b", "text": "<p>hi <i>x</i>", "kids": [3]},
    {"id": 3, "type": "comment", "parent": 2, "by": "c", "text": "ho"},
]
NESTED = {"id": 1, "title": "T", "author": "a", "points": 2, "children": [{"id": 2, "text": "c", "children": []}]}
OPINION = {
    "id": 7, "plain_text": WORDS, "html_with_citations": f"<p>{WORDS}<span class='star-pagination'>*2</span></p>",
    "citation": {"case_name": "A v. B"}, "date_filed": "1999-01-01",
}  # fmt: skip
OPINIONS_CSV = b'id,type,plain_text,html\n1,010combined,"It is ""so"" ordered.",\n2,x,,"<p>By the court.</p>"\n'
ABSTRACTS_CSV = b'"APPLICATION_ID","ABSTRACT_TEXT"\r\n"1","DESCRIPTION: We study\nmice."\r\n"2","Rats \x92"\r\n'
ROWS = [{"text": WORDS, "meta": {"a": 1}}, {"content": "b", "license": "MIT"}, {"text": ["x", "y"], "id": 3}]
WARC = b"".join(test_pile_cc.record(HTML) for _ in range(3))
WET = test_pile_cc.record(WORDS.encode() * 3, kind="conversion", media="text/plain") * 2
SUBMISSION = json.dumps({"url": "http://a.example/", "score": 9, "is_self": False, "subreddit": "s", "id": "x"})


def lines(*rows: object) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zipped(**members: bytes) -> bytes:
    """A zip archive."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target.getvalue()


def tarred(members: Raw) -> bytes:
    """A tar archive."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return target.getvalue()


def seven_zipped(members: Raw) -> bytes:
    """A 7z archive."""
    import py7zr

    target = io.BytesIO()
    with py7zr.SevenZipFile(target, "w", filters=[{"id": py7zr.FILTER_LZMA2, "preset": 0}]) as archive:
        for name, content in members.items():
            archive.writestr(content, name)
    return target.getvalue()


def parquet(rows: list[dict[str, object]], rows_a_group: int = 2) -> bytes:
    """A Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), target, row_group_size=rows_a_group)
    return target.getvalue()


def repository() -> Raw:
    """The files of a bare repository with a pack; none where git is not here."""
    files = {"LICENSE": licence_text(), "src/a.py": "x = 1\n" * 20, "src/b.py": "x = 1\n" * 19 + "y = 2\n"}
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        for name, content in files.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(content)
        named = [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "init.defaultBranch=main",
            "-c",
            "commit.gpgsign=false",
        ]
        try:
            for command in (
                ["init", "-q"],
                ["add", "-A"],
                ["commit", "-qm", "m"],
                ["repack", "-qad"],
                ["pack-refs", "--all"],
            ):
                subprocess.run(["git", *named, *command], cwd=folder, check=True, capture_output=True)
        except (FileNotFoundError, subprocess.CalledProcessError):
            return {}
        bare = top / ".git"
        kept = [path for path in sorted(bare.rglob("*")) if path.is_file() and "hooks" not in path.parts]
        return {f"repo.git/{path.relative_to(bare)}": path.read_bytes() for path in kept if path.name != "index"}


def licence_text() -> str:
    """Enough of a licence to be known."""
    return 'MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy ("Software")\n'


def seeds() -> dict[str, list[Raw]]:
    """The inputs of every source."""
    mediawiki = test_wikipedia_en.DUMP[:6_000] + b"</mediawiki>"
    posts, history = test_stackexchange.VALID, test_stackexchange.posts(test_stackexchange.question(5))
    article, book, patents = test_pubmed_central.VALID, test_epub.VALID, test_uspto_backgrounds
    abstracts = test_pubmed_abstracts.VALID if isinstance(test_pubmed_abstracts.VALID, bytes) else b""
    pdf = test_pdf.pdf([(72, 700, 10, WORDS), (72, 688, 10, "Good bye.")], [(72, 700, 10, "Page two (x).")])
    record = test_philpapers.RECORD.encode()
    day, sitting = test_ubuntu_irc.DAY, _bytes(test_europarl.SITTING) * 3
    mail, mbox = test_mail.PLAIN_AND_HTML, test_mail.MBOX
    squeeze = zstandard.ZstdCompressor().compress
    found: dict[str, list[Raw]] = {
        "pile-cc": [
            {"a.warc": WARC},
            {"a.warc.gz": b"".join(gzip.compress(test_pile_cc.record(HTML)) for _ in range(3))},
            {"a.warc.wet": WET},
            {"a.warc.wet.gz": gzip.compress(WET)},
            {"a.warc.zst": squeeze(WARC)},
            {"c.jsonl": lines({"raw_content": WORDS, "url": "u", "language": "en"})},
            {"p.html": HTML},
            {"a.zip": zipped(**{"a.warc": WARC})},
        ],
        "pubmed-central": [
            {"a.nxml": article},
            {"a.tar.gz": gzip.compress(tarred({"PMC1/a.nxml": article, "b.nxml": article}))},
        ],
        "books3": [{"a.epub": book}, {"b.tar": tarred({"a.epub": book})}],
        "openwebtext2": [
            {"p.html": HTML},
            {"RS_1.zst": squeeze(SUBMISSION.encode() + b"\n"), "a.warc.gz": gzip.compress(WARC)},
        ],
        "arxiv": [
            {"a.tex": TEX},
            {"1.gz": gzip.compress(TEX)},
            {"2.tar.gz": gzip.compress(tarred({"m.tex": TEX, "s.tex": rb"\input{m}", "r.bbl": rb"\bibitem{k} K."}))},
            {"arXiv_src_2001_001.tar": tarred({"2001/2001.00001.gz": gzip.compress(TEX), "2001/2001.00002.pdf": pdf})},
        ],
        "github": [
            repository(),
            {"a/x.py": b"x = 1\n" * 9, "a/LICENSE": licence_text().encode()},
            {"r.zip": zipped(**{"r/x.py": b"x = 1\n" * 9, "r/LICENSE": b"MIT License"})},
            {"r.tar.gz": gzip.compress(tarred({"r/x.c": b"int a;\n" * 9}))},
        ],
        "freelaw": [
            {"7.json": lines(OPINION)},
            {"o.jsonl.xz": lzma.compress(lines(OPINION, OPINION))},
            {"opinions.csv": OPINIONS_CSV},
            {"opinions.csv.bz2": bz2.compress(OPINIONS_CSV)},
            {
                "all.tar": tarred(
                    {"ca9.tar.gz": gzip.compress(tarred({"7.json": lines(OPINION), "8.json": lines(OPINION)}))}
                )
            },
        ],
        "stackexchange": [
            {"Posts.xml": posts},
            {"a.stackexchange.com.7z": seven_zipped({"Posts.xml": posts, "Tags.xml": b"<t/>"})},
            {"Posts.xml": history},
        ],
        "uspto-backgrounds": [
            {"pftaps19760113_wk02.txt": patents.APS.encode() * 2},
            {"pg020101.xml": patents.XML_2.encode() * 2},
            {"ipg140107.zip": zipped(**{"ipg140107.xml": patents.XML_4.encode() * 3})},
        ],
        "pubmed-abstracts": [{"pubmed24n0001.xml.gz": gzip.compress(abstracts)}, {"pubmed24n0001.xml": abstracts}],
        "gutenberg-pg-19": [{"1.txt": GUTENBERG}, {"1.zip": zipped(**{"1.txt": GUTENBERG})}],
        "opensubtitles": [
            {"en/1933/2/1.xml": test_subtitles.OPUS},
            {"1.xml.gz": gzip.compress(test_subtitles.TOKENS)},
            {"a.srt": test_subtitles.FORMATS["srt"]},
        ],
        "wikipedia-en": [
            {"enwiki-pages-articles.xml": mediawiki},
            {"enwiki-pages-articles-multistream.xml.bz2": test_wikipedia_en.multistream()},
        ],
        "dm-mathematics": [
            {"algebra__linear_1d.txt": b"Solve x = 1 for x.\n1\n" * 30},
            {"m.tar.gz": gzip.compress(tarred({"train-easy/a__b.txt": b"1+1?\n2\n"}))},
        ],
        "ubuntu-irc": [
            {"2004/07/05/#ubuntu.txt": day, "2004/07/06/#ubuntu.txt": day},
            {"l.tar": tarred({"2004/07/05/#u.txt": day})},
        ],
        "bookcorpus2": [{"a.epub": book}],
        "europarl": [
            {"txt/en/ep-00-01-17.txt": sitting},
            {"europarl.tgz": gzip.compress(tarred({"txt/de/ep-00-01-17.txt": sitting}))},
        ],
        "hackernews": [
            {"i.jsonl": lines(*ITEMS)},
            {"a.json": json.dumps(NESTED).encode()},
            {"i.json": json.dumps(ITEMS).encode()},
        ],
        "youtubesubtitles": [{f"v.en.{kind}": content} for kind, content in test_subtitles.FORMATS.items()],
        "philpapers": [{"r.xml": record}, {"p.pdf": pdf, "p.xml": record}],
        "nih-exporter": [
            {"RePORTER_PRJABS_C_FY2020.csv": ABSTRACTS_CSV},
            {"RePORTER_PRJABS_C_FY2020.zip": zipped(**{"a.csv": ABSTRACTS_CSV})},
        ],
        "enron-emails": [
            {"maildir/allen-p/inbox/1.": mail, "maildir/allen-p/inbox/2.": test_mail.SIMPLE},
            {"a.mbox": mbox},
            {"emails.csv": b'"file","message"\n"a","Subject: s\n\nhello"\n"b","Subject: t\n\nbye"\n'},
            {"e.tar.gz": gzip.compress(tarred({"maildir/a/1.": mail}))},
        ],
        "text": [
            {"a.txt": WORDS.encode()},
            {"a.txt.gz": gzip.compress(WORDS.encode())},
            {"a.7z": seven_zipped({"a.txt": b"a", "b.txt": b"b"})},
        ],
        "jsonl": [
            {"a.jsonl": lines(*ROWS)},
            {"a.jsonl.zst": squeeze(lines(*ROWS))},
            {"a.json": json.dumps(ROWS).encode()},
        ],
        "parquet": [{"a.parquet": parquet([{"text": WORDS, "n": n, "w": {"a": [1.5]}} for n in range(5)])}],
        "html": [{"a.html": HTML}],
        "markdown": [{"a.md": MARKDOWN}],
        "code": [
            {"a.py": b"import os\n\n\ndef f():\n    return 1\n"},
            {"n.ipynb": b'{"cells": [{"cell_type": "code", "source": ["x"]}]}'},
        ],
        "epub": [{"a.epub": book}],
        "pdf": [{"a.pdf": pdf}],
        "mail": [{"a.eml": mail}, {"a.mbox": mbox}, {"new/1600000000.M1P1.host:2,S": test_mail.SIMPLE}],
    }
    return {slug: [raw for raw in raws if raw] for slug, raws in found.items()}


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
