"""`AnswerText`: the text of one answer from its tokens, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.serve.request import SamplingParams
from piledriver.serve.text.detokenizer import make_detokenizer
from piledriver.serve.text.stop_strings import StopStrings


class AnswerText:
    """Decodes the tokens of one answer as they come. The pieces concatenate to the whole text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = make_detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop)

    def push(self, tokens: Sequence[int]) -> tuple[str, str | None]:
        """Return the text that further tokens add, and the stop string that ends it (None before the end)."""
        return self._stops.push(self._detokenizer.push(tokens))

    def finish(self) -> str:
        """Return what was held back, once no more tokens follow."""
        text, stop = self._stops.push(self._detokenizer.finish())
        return text if stop is not None else text + self._stops.finish()
