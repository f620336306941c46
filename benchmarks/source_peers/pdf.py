"""The usual pure-Python reader of PDF text: pdfminer.six (the original used the Java program PDFBox)."""

from __future__ import annotations

import io

CASES = ["philpapers/N18-3011.pdf"]


def peer(content: bytes) -> str:
    from pdfminer.high_level import extract_text

    text: str = extract_text(io.BytesIO(content))
    return text
