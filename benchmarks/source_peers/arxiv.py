"""What the original used for arXiv: pandoc, LaTeX to Markdown, on the paper as one file."""

from __future__ import annotations

import gzip
import io
import tarfile

CASES = ["arxiv/1911.02782.gz", "arxiv/sympy-paper/numerics.tex", "arxiv/sympy-paper/architecture.tex"]


def peer(content: bytes) -> str:
    import pypandoc

    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if content[257:262] == b"ustar":
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            names = [name for name in archive.getnames() if name.endswith(".tex")]
            member = archive.extractfile(max(names, key=lambda name: archive.getmember(name).size))
            assert member is not None
            content = member.read()
    text: str = pypandoc.convert_text(content, "markdown", format="latex", extra_args=["--wrap=none"])
    return "\n".join(line for line in text.split("\n") if not line.startswith(":::"))
