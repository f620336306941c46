"""What the original used for PubMed Central: pandoc, JATS to Markdown, without the lines of its fenced divs."""

from __future__ import annotations

CASES = [
    "pubmed-central/1471-2180-11-174.nxml",
    "pubmed-central/1472-6831-8-11.nxml",
    "pubmed-central/ehp-116-1694.nxml",
    "pubmed-central/mds526.nxml",
    "pubmed-central/pone.0000217.nxml",
    "pubmed-central/pone.0046493.nxml",
    "pubmed-central/PMC5828200.nxml",
    "pubmed-central/PMC7417471.nxml",
]


def peer(content: bytes) -> str:
    import pypandoc

    text: str = pypandoc.convert_text(content, "markdown", format="jats", extra_args=["--wrap=none"])
    return "\n".join(line for line in text.split("\n") if not line.startswith(":::"))
