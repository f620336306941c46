"""`Grammar`: what an answer must match, and a `GrammarConstraint` for each answer, by llguidance."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from piledriver.core.errors import MissingDependencyError
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.serve.request import RequestError

if TYPE_CHECKING:
    import llguidance


# A model that is unsure may write blanks for ever where JSON allows any number of them.
_WHITESPACE = {"whitespace_pattern": r"[ \n\t]{0,16}"}


_SECONDS_ALONE, _FEW = 0.0005, 4
"""Time after which, and masks from which on, masks of a step are computed in threads."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos)

    def json_schema(self, schema: dict[str, Any] | bool, parameter: str = "response_format") -> Grammar:
        """Return the grammar of JSON texts that are valid against a schema."""
        try:
            source = _llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_WHITESPACE)
        except ValueError as error:
            raise _refused("schema", str(error), parameter) from error
        return self._checked(source, "schema", parameter)

    def json_object(self, parameter: str = "response_format") -> Grammar:
        """Return the grammar of JSON objects."""
        return self.json_schema({"type": "object"}, parameter)

    def regex(self, pattern: str, parameter: str = "structured_outputs") -> Grammar:
        """Return the grammar of texts that match a regular expression from beginning to end."""
        return self._checked(_llguidance().LLMatcher.grammar_from_regex(pattern), "regular expression", parameter)

    def choice(self, choices: list[str], parameter: str = "structured_outputs") -> Grammar:
        """Return the grammar of exactly these texts."""
        if not choices:
            raise _refused("choice", "it is empty", parameter)
        return self.regex("|".join(map(re.escape, choices)), parameter)

    def lark(self, source: str, parameter: str = "structured_outputs") -> Grammar:
        """Return a context-free grammar in Lark's notation."""
        return self._checked(_llguidance().LLMatcher.grammar_from_lark(source), "grammar", parameter)

    def _checked(self, source: str, kind: str, parameter: str) -> Grammar:
        failed, said = _llguidance().LLMatcher.validate_grammar_with_warnings(source, self.tokens)
        if failed:
            raise _refused(kind, said[0].strip().splitlines()[0], parameter)
        return Grammar(source, self.tokens)

    @cached_property
    def tokens(self) -> llguidance.LLTokenizer:
        """The vocabulary in llguidance's form; made once, because its prefix tree takes a moment."""
        library = _llguidance()
        made: llguidance.LLTokenizer
        if self._tokenizer.suffix == ".json":
            text = self._tokenizer.content.decode("utf-8")
            made = library.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos or None)
        else:
            words = library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos))
            made = library.LLTokenizer(words, n_vocab=self._vocab_size)
        return made


class Grammar:
    """A compiled grammar; each answer gets a constraint of its own."""

    def __init__(self, source: str, tokens: llguidance.LLTokenizer) -> None:
        self.source, self._tokens = source, tokens
        """The grammar in llguidance's form."""

    def constraint(self) -> GrammarConstraint:
        """Return the constraint of one answer."""
        return GrammarConstraint(_llguidance().LLMatcher(self._tokens, self.source, log_level=0))


class GrammarConstraint:
    """Allows the tokens that can continue a text of the grammar; implements `Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def fill_mask(self, mask: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Set the bit of each allowed token."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    @staticmethod
    def fill_masks(
        constraints: Mapping[int, GrammarConstraint], masks: np.ndarray[Any, np.dtype[np.int32]]
    ) -> dict[int, Exception]:
        """Fill row i of `masks` for constraint i; return the errors of single rows.

        Most masks take microseconds, less than waking a thread. If they take longer, the others are computed in
        llguidance's threads.
        """
        address, stride = masks.ctypes.data, masks.strides[0]
        left, until = list(constraints.items()), time.perf_counter() + _SECONDS_ALONE
        while left and (len(left) < _FEW or time.perf_counter() < until):
            at, constraint = left.pop()
            constraint._matcher.unsafe_compute_mask_ptr(address + at * stride, stride)
        if left:
            matchers = [(constraint._matcher, at) for at, constraint in left]
            _executor().unsafe_compute_mask_ptr(matchers, address, stride, len(masks))
        errors: dict[int, Exception] = {}
        for at, constraint in constraints.items():
            try:
                constraint._check()
            except RequestError as error:
                errors[at] = error
        return errors

    def accept(self, token: int) -> None:
        """Advance by a token."""
        self._matcher.consume_token(token)
        self._check()

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        if count:
            self._matcher.rollback(count)

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar stopped: {self._matcher.get_error().strip().splitlines()[0]}",
                fix="simplify the schema or grammar",
                parameter="response_format",
            )


class _Vocabulary:
    """A tokenizer without `tokenizer.json`, as llguidance reads one."""

    def __init__(self, tokenizer: Tokenizer, eos: list[int]) -> None:
        if tokenizer.pieces is None or not eos:
            raise RequestError(
                "this tokenizer has no fixed bytes for each token, or no end token",
                fix="serve a model with a tokenizer.json to use structured output",
                parameter="response_format",
            )
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos[0], None
        self.tokens = list(tokenizer.pieces)
        self.special_token_ids = sorted(tokenizer.specials.values())

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8") if isinstance(text, bytes) else text
        return [int(token) for token in self._tokenizer.encode(plain)]


@functools.cache
def _executor() -> llguidance.LLExecutor:
    executor: llguidance.LLExecutor = _llguidance().LLExecutor()
    return executor


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependencyError("llguidance", extra="serve", purpose="structured output") from error
    return llguidance


def _refused(kind: str, reason: str, parameter: str) -> RequestError:
    return RequestError(f"the {kind} cannot be used: {reason}", fix="change or remove that part", parameter=parameter)
