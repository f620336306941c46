"""What the original used for Enron: mail-parser, here on the messages of a CSV, one in each row.

In the maildir every message is a file of its own, and opening half a million of them takes longer than parsing. The
samples have a few rows each, so they are taken many times: the real file has 500,000.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

SAMPLES = Path(__file__).resolve().parents[3] / "shared" / "raw-samples" / "enron-emails"
CASES: list[str] = []


def made(times: int = 50) -> dict[str, bytes]:
    """The rows of all samples, so many times, below one header."""
    files = [path.read_bytes().partition(b"\n") for path in sorted(SAMPLES.glob("*_example.csv"))]
    return {"emails.csv": files[0][0] + b"\n" + times * b"".join(rows for _, _, rows in files)} if files else {}


def peer(content: bytes) -> str:
    import mailparser

    rows = csv.DictReader(io.StringIO(content.decode()))
    return "\n\n".join(mailparser.parse_from_bytes(row["message"].encode()).body for row in rows)
