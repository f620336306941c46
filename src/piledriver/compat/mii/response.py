"""`Response`: one answer in MII's form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Response:
    """One generated text."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str

    def __str__(self) -> str:
        return self.generated_text
