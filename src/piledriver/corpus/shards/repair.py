"""Repair shards: keep every document that can be read, with its id, source and meta, and count the rest."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, UsageError
from piledriver.corpus.document import Refusal, refusal_line
from piledriver.corpus.shards.reader import read_shards, shard_paths, shard_stem
from piledriver.corpus.shards.writer import SUFFIX, ShardFileWriter


@dataclass(frozen=True)
class RepairSummary:
    """The counts of one repair."""

    files: int
    documents: int
    bad: int
    """Lines and frames that cannot be read; each is named in the rejects."""


def repair_shards(
    location: storage.Location, out: storage.Location, *, rejects: storage.Location | None = None
) -> RepairSummary:
    """Write the readable documents of a shard to the file `out`, or those of a folder to shards of the same names.

    `rejects` gets one JSON line for each line or frame that cannot be read, with its place and the reason.
    """
    root = os.fspath(location).rstrip("/")
    paths = shard_paths(location)
    if paths == [os.fspath(location)]:
        targets = [os.fspath(out)]
    else:
        targets = [storage.join(out, shard_stem(path.removeprefix(f"{root}/")) + SUFFIX) for path in paths]
    for path, target in zip(paths, targets, strict=True):
        if os.path.realpath(path) == os.path.realpath(target):
            raise UsageError(f"{path} is both input and output", fix="write to another place")
        if not target.endswith(SUFFIX):
            raise UsageError(f"{target} must end in {SUFFIX}", fix=f"write to {target}{SUFFIX}")
    documents = bad = 0
    with ExitStack() as stack:
        rejected = None if rejects is None else stack.enter_context(ShardFileWriter(rejects))

        def on_bad(path: str, number: int, why: str) -> None:
            nonlocal bad
            bad += 1
            if rejected is not None:
                rejected.write_line(refusal_line(Refusal("unreadable", f"{path}#{number}", why)))

        for path, target in zip(paths, targets, strict=True):
            with ShardFileWriter(target) as shard:
                for document in read_shards(path, on_bad=on_bad):
                    shard.write(document)
                    documents += 1
        if not documents:
            for target in targets:
                storage.remove_file(target)
            raise CorruptFileError(f"{location}: no document can be read", fix="copy or build it again")
    return RepairSummary(len(paths), documents, bad)
