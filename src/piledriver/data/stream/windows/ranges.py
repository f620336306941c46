"""Token ranges: what each source holds in the shards, after exclusions."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.data.tokens.token_set import TokenSet


@dataclass(frozen=True)
class TokenRange:
    """Tokens `start` to `stop` of a shard: complete documents of one source and one licence."""

    shard: int
    start: int
    stop: int
    first_row: int
    """First of its documents in the shard."""
    last_row: int
    """Document after its last one."""


def ranges_by_source(
    tokens: TokenSet, exclude_sources: frozenset[str], exclude_licences: frozenset[str]
) -> dict[str, list[TokenRange]]:
    """Return the token ranges of each source, sorted by name, without what is excluded."""
    found: dict[str, list[TokenRange]] = {}
    for number, shard in enumerate(tokens.shards):
        start = row = 0
        for group in shard.metadata["groups"]:
            one = TokenRange(number, start, start + group["tokens"], row, row + group["documents"])
            start, row = one.stop, one.last_row
            if group["source"] not in exclude_sources and group["licence"] not in exclude_licences:
                found.setdefault(group["source"], []).append(one)
    return dict(sorted(found.items()))
