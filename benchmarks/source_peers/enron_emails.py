"""What the original used for Enron: mail-parser, here on the messages of a CSV, one in each row.

In the maildir every message is a file of its own, and opening half a million of them takes longer than parsing.
"""

from __future__ import annotations

import csv
import io

CASES = [
    "enron-emails/1_one_simple_example.csv",
    "enron-emails/2_multiple_simple_example.csv",
    "enron-emails/3_one_forwarded_example.csv",
]


def peer(content: bytes) -> str:
    import mailparser

    rows = csv.DictReader(io.StringIO(content.decode()))
    return "\n\n".join(mailparser.parse_from_bytes(row["message"].encode()).body for row in rows)
