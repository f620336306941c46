"""The state of one answer while it is decoded: tokens that are known, tokens that are computed, blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from piledriver.serve.scheduling.blocks import Root


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer of a request. Steps let `computed` catch up with what is known."""

    number: int
    """Order of arrival."""
    tokens: list[int]
    """Prompt, then answer, as far as the host has read them."""
    prompt_length: int
    limit: int
    """Most tokens, prompt included."""
    priority: int = 0
    salt: str = ""
    reuse: bool = True
    """Whether to look up the prompt in the prefix cache; not if the log-probabilities of the prompt are wanted."""
    computed: int = 0
    """Tokens whose keys and values are in the cache, or will be once the steps launched so far are done."""
    pending: int = 0
    """Tokens that were sampled on the device and not read yet: known to exist, with unknown values."""
    draft: list[int] = field(default_factory=list)
    """Guesses of the next tokens, to be verified."""
    blocks: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    """Numbers of the prefixes that end with each published block."""
    root: Root = (0, "")
    cached: int = 0
    """Prompt tokens that were found in the prefix cache when the sequence first ran."""
    slot: int = -1
    """Row of the device's tables while the sequence runs."""
    owner: object = None
    """What the engine keeps beside the sequence."""

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.number
