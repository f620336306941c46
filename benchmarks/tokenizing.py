"""Tokenising end to end (read, encode, write) per CPU-second, against Hugging Face `tokenizers` encoding alone.

The text is this machine's own: the documentation and source of the Python installation and its packages.
"""

from __future__ import annotations

import json
import site
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from piledriver.corpus import Document, ShardFileWriter, read_texts
from piledriver.data import TokenizerTraining, open_tokenizer, train_tokenizer
from piledriver.data.tokens.tokenize import TokenizeConfig, tokenize_corpus

MAX_BYTES = 300_000_000


def own_files() -> Iterator[Document]:
    """Text files below the Python installation, in a fixed order, no file twice."""
    roots = [sysconfig.get_paths()["stdlib"], *site.getsitepackages()]
    seen: set[Path] = set()
    total = 0
    for root in roots:
        for path in sorted(Path(root).rglob("*")):
            if path.suffix not in (".py", ".pyi", ".txt", ".md", ".rst", ".h", ".json") or path in seen:
                continue
            seen.add(path)
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            total += len(text)
            if total > MAX_BYTES:
                return
            yield Document(text, str(len(seen)), path.suffix, {})


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ShardFileWriter(folder / "corpus" / "00000.jsonl.zst") as writer:
            for document in own_files():
                writer.write(document)
        tokenizer = folder / "tokenizer.json"
        training = TokenizerTraining(vocab_size=32768, sample_bytes=30_000_000)
        tokenizer.write_bytes(train_tokenizer(folder / "corpus", training).content)

        begun = time.process_time()
        tokens = tokenize_corpus(folder / "corpus", tokenizer, folder / "tokens", TokenizeConfig())
        ours = tokens.byte_count / (time.process_time() - begun) / 1e6
        encoder = open_tokenizer(tokenizer).encoder

        from tokenizers import Tokenizer

        reference = Tokenizer.from_file(str(tokenizer))
        sample = list(read_texts(folder / "corpus"))[:: max(1, tokens.documents // 400)]
        size = sum(len(text.encode()) for text in sample)
        rates = []
        for _ in range(3):
            begun = time.process_time()
            for text in sample:
                reference.encode(text, add_special_tokens=False)
            rates.append(size / (time.process_time() - begun) / 1e6)
        peer = statistics.median(rates)

        alone = open_tokenizer(tokenizer).encode_batch
        texts = list(read_texts(folder / "corpus"))
        begun = time.process_time()
        for start in range(0, len(texts), 200):
            alone(texts[start : start + 200])
        limit = tokens.byte_count / (time.process_time() - begun) / 1e6
    row = {
        "row": "tokenize",
        "ours": round(ours, 1),
        "peer": round(peer, 2),
        "limit": round(limit, 1),
        "ratio_to_peer": round(ours / peer, 1),
        "unit": "MB per CPU-second; ours reads, encodes, checks and writes; the peer (tokenizers) and the limit "
        f"({encoder}) only encode",
        "goal": "ratio_to_peer >= 20",
        "megabytes": round(tokens.byte_count / 1e6),
        "python": sys.version.split()[0],
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
