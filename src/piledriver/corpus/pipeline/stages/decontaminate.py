"""Decontaminate: remove evaluation text from the corpus. The method is in `dedup/contamination.py`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from piledriver.core import storage
from piledriver.core.errors import PiledriverError
from piledriver.corpus.dedup import contamination
from piledriver.corpus.dedup.arrays import write_arrays
from piledriver.corpus.document import Document, document_id
from piledriver.corpus.pipeline.chunks import Dropped, read_chunk, write_chunk
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome
from piledriver.corpus.pipeline.stages.filter import check_unchanged
from piledriver.corpus.pipeline.tasks import Task, sibling_folder
from piledriver.corpus.raw.streams import local_files
from piledriver.corpus.shards.reader import read_texts

_NAMES = "names.json"
_CUT = "cut around evaluation text"


@dataclass(frozen=True, kw_only=True)
class Decontaminate:
    """Remove documents that contain evaluation text, or cut the evaluation text out of them."""

    FILES: ClassVar[tuple[str, ...]] = ("files",)

    files: list[str] = field(default_factory=list)
    """Evaluation text: .txt files (one text each), JSON lines with "text", compressed or not, and folders of them."""
    words: int = 13
    """How many consecutive words must be the same."""
    action: Literal["remove", "cut"] = "remove"
    """Remove the document, or cut around the evaluation text and keep the pieces as documents."""
    cut_characters: int = 200
    """How many characters to cut before and after the evaluation text."""
    min_piece_characters: int = 200
    """Pieces that are not longer are dropped."""
    max_pieces: int = 10
    """A document that would be cut into more is removed."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("decontaminate has no files; give the evaluation text in settings: {files: [...]}")
        if self.words < 1 or self.cut_characters < 0 or self.min_piece_characters < 0 or self.max_pieces < 1:
            raise ValueError("words and max_pieces must be at least 1, characters not negative")

    def __call__(self, corpus: StageInput) -> StageOutcome:
        """Run the stage."""
        files = [(path, origin) for path, origin, _ in local_files(self.files)]
        task = Task.call(
            index_evaluation_texts,
            files=[[origin, storage.sha256(path)] for path, origin in files],
            words=self.words,
            payload=[path for path, _ in files],
        )
        (index,) = corpus.executor.map([task])
        # The index holds the content of the files; where they are must not change the keys.
        settings = {**asdict(self), "files": ["index"]}
        tasks = (
            Task.call(decontaminate_chunk, chunk=chunk.key, index=index.key, settings=settings)
            for chunk in corpus.chunks
        )
        return corpus.rewrite("decontaminate", tasks)


def index_evaluation_texts(folder: str, files: list[list[str]], words: int, payload: list[str]) -> dict[str, Any]:
    """Write the n-grams of the evaluation texts (a task); `files` has origins and checksums, `payload` the paths."""
    names: list[str] = []

    def texts() -> Iterator[tuple[int, str]]:
        for (origin, checksum), path in zip(files, payload, strict=True):
            check_unchanged(path, checksum)
            if path.endswith((".jsonl", ".jsonl.zst", ".jsonl.gz")):
                for number, text in enumerate(read_texts(path)):
                    names.append(f"{origin}#{number}")
                    yield len(names) - 1, text
            else:
                names.append(origin)
                yield len(names) - 1, storage.read_text(path)

    hashes, owners, short = contamination.index_ngrams(texts(), words)
    if not len(hashes):
        raise PiledriverError(
            f"the evaluation text has no sequence of {words} words", fix="check the files of the decontaminate stage"
        )
    write_arrays(folder, hashes=hashes, owners=owners)
    storage.write_text(os.path.join(folder, _NAMES), json.dumps(names, ensure_ascii=False))
    return {"texts": len(names), "sequences": len(hashes), "texts_too_short": short}


def decontaminate_chunk(folder: str, chunk: str, index: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Write one chunk without evaluation text (a task). A document that is cut is replaced by its pieces."""
    rules = Decontaminate(**settings)
    indexed = sibling_folder(folder, index)
    ngrams = contamination.NgramIndex(indexed, rules.words)
    names = json.loads(storage.read_text(os.path.join(indexed, _NAMES)))
    hits: Counter[str] = Counter()
    cut = 0

    def judged() -> Iterator[Document | Dropped]:
        nonlocal cut
        for document in read_chunk(folder, chunk):
            spans, owners = ngrams.hits(document.text)
            if not spans:
                yield document
                continue
            found = [names[owner] for owner in owners]
            hits.update(found)
            detail = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            pieces = _pieces(document, spans, rules)
            cut += bool(pieces)
            kept = pieces[0].id if pieces else ""
            reason = _CUT if pieces else "evaluation text"
            yield Dropped(document.id, document.source, "decontaminate", reason, detail, kept)
            yield from pieces

    counts = write_chunk(folder, judged())
    # In the ledger with the piece that is kept, but not dropped.
    counts["dropped"].pop(f"decontaminate: {_CUT}", None)
    removed = {"removed": {f"documents {_CUT}": cut}} if cut else {}
    return {**counts, **removed, "hits": dict(sorted(hits.items()))}


def _pieces(document: Document, spans: list[tuple[int, int]], rules: Decontaminate) -> list[Document]:
    if rules.action == "remove":
        return []
    left = contamination.pieces_around(len(document.text), spans, rules.cut_characters, rules.min_piece_characters)
    if len(left) > rules.max_pieces:
        return []
    return [
        Document(
            document.text[begin:end],
            document_id(document.text[begin:end], document.source, f"{document.id}:{begin}"),
            document.source,
            {**document.meta, "cut_from": document.id, "cut_at": begin},
        )
        for begin, end in left
    ]
