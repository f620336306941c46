"""Token counts of an answer, and the error of a request that failed while it was served."""

from __future__ import annotations

from typing import Any

from piledriver.core.errors import PiledriverError
from piledriver.serve.errors import ServeError
from piledriver.serve.request import RequestError, RequestOutput


class Usage:
    """Counts tokens over the requests of one call."""

    def __init__(self) -> None:
        self.prompt = self.completion = self.cached = 0

    def add(self, final: RequestOutput, *, free: bool = False) -> None:
        """Count a finished request; `free` leaves out its answer, which was only drawn to score the prompt."""
        self.prompt += len(final.prompt_token_ids)
        self.cached += final.cached_tokens
        if not free:
            self.completion += sum(len(completion.token_ids) for completion in final.completions)

    def body(self) -> dict[str, Any]:
        """Return the counts in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def failure_of(event: RequestOutput) -> PiledriverError | None:
    """Return the error of a request that failed, or None."""
    if not event.finished or not any(completion.finish_reason == "error" for completion in event.completions):
        return None
    reason = event.error or "the engine gave no reason"
    if reason.startswith("RequestError: "):
        return RequestError(reason.removeprefix("RequestError: "), fix="change the request")
    return ServeError(f"the request failed: {reason}", fix="try again; the server's log has the cause")
