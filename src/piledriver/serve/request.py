"""What a caller asks of the engine and what the engine answers: plain data without torch.

`SamplingParams` says how tokens are chosen and when to stop, `Request` joins it with a prompt, `RequestOutput` is one
event of the answer: what is new since the last one, and everything once it is finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from piledriver.core.errors import UsageError

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: an end token or stop string; `length`: the token limit; `abort`: cancelled; `error`: this request failed."""


class RequestError(UsageError):
    """A request that cannot be served: a value out of range, or a prompt that does not fit the context."""

    def __init__(self, message: str, *, fix: str, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.parameter = parameter
        """Field of the request that is at fault."""
        self.code = code
        """Machine-readable cause in OpenAI's spelling, such as `context_length_exceeded`."""


class Constraint(Protocol):
    """Restricts the next token of one sequence (structured output). Each sequence needs an object of its own.

    A class may also have a static method `fill_masks(constraints, masks)`, which fills the rows of a matrix for several
    sequences at once (`{row: constraint}`) and returns the errors of single rows (`{row: error}`).
    """

    def fill_mask(self, mask: Any) -> None:
        """Set bit t of `mask` (numpy int32 words, the lowest bit first, all zero) for each allowed token t."""

    def accept(self, token: int) -> None:
        """Advance by a token that was chosen, or by a draft token that is being verified."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` calls of `accept`: draft tokens that were rejected."""

    @property
    def finished(self) -> bool:
        """Whether no token may follow; the sequence then ends with `stop`."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it stops."""

    max_tokens: int | None = 16
    """Most new tokens; None for as many as the context holds."""
    min_tokens: int = 0
    """End tokens and stop strings have no effect before this many new tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 chooses the most likely token."""
    top_k: int = 0
    """Sample among this many most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Sample among the fewest tokens whose probabilities reach this sum (Holtzman et al., 2019)."""
    min_p: float = 0.0
    """Sample among tokens at least this fraction as likely as the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer already has."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that the answer has the token."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer (Keskar et al., CTRL, 2019)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    seed: int = 0
    """Token i of an answer depends on the seed, the index of the answer (`n`) and i only."""
    n: int = 1
    """Number of answers."""
    best_of: int | None = None
    """Draw this many answers and return the `n` of the highest mean log-probability; None for `n`."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, beside the model's own."""
    include_stop: bool = False
    """Whether the answer includes the stop string that ended it."""
    ignore_eos: bool = False
    """Whether to continue after the model's end token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Report the log-probability of each new token and of this many most likely ones; None for none."""
    prompt_logprobs: int | None = None
    """The same for the prompt."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Log-probabilities of the model itself, or after penalties, temperature and truncation."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, good, range_ in _RANGES:
            value = getattr(self, name)
            if value is not None and not good(value):
                raise RequestError(f"{name} is {value}", fix=f"give a value {range_}", parameter=name)
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of {self.best_of} is less than n {self.n}", fix="raise best_of", parameter="n")
        if "" in self.stop:
            raise RequestError("a stop string is empty", fix="leave it out", parameter="stop")

    @property
    def draws(self) -> int:
        """Number of answers that are drawn."""
        return self.best_of or self.n

    @property
    def processed(self) -> bool:
        """Whether logits are changed before the temperature: penalties or biases."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.logit_bias
        )

    @property
    def truncated(self) -> bool:
        """Whether a part of the distribution is cut off."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


_RANGES: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", lambda v: v >= 1, "of 1 or more"),
    ("min_tokens", lambda v: v >= 0, "of 0 or more"),
    ("temperature", lambda v: 0 <= v < float("inf"), "of 0 or more"),
    ("top_k", lambda v: v >= 0, "of 0 (all tokens) or more"),
    ("top_p", lambda v: 0 < v <= 1, "over 0, up to 1"),
    ("min_p", lambda v: 0 <= v <= 1, "from 0 to 1"),
    ("presence_penalty", lambda v: -2 <= v <= 2, "from -2 to 2"),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "from -2 to 2"),
    ("repetition_penalty", lambda v: 0 < v < float("inf"), "over 0"),
    ("n", lambda v: v >= 1, "of 1 or more"),
    ("logprobs", lambda v: v >= 0, "of 0 or more"),
    ("prompt_logprobs", lambda v: v >= 0, "of 0 or more"),
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt with its sampling parameters."""

    id: str
    """Chosen by the caller or by the engine; unique among the requests that are being served."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs first, and is preempted last."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    constraints: tuple[Constraint, ...] = ()
    """One for each drawn answer; empty for free text."""


TopLogprobs = tuple[tuple[int, float], ...]
"""(token, log-probability) of the most likely tokens, the most likely first."""


class TokenLogprob(NamedTuple):
    """The log-probability of a token, and of the most likely tokens at its place."""

    token: int
    logprob: float
    top: TopLogprobs = ()
    """All come from one computation."""


@dataclass
class Completion:
    """One answer of a request, as far as it was decoded."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float = 0.0
    """Sum of the raw log-probabilities of `token_ids`."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the model's end token."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


def best_completions(completions: Sequence[Completion], count: int) -> list[Completion]:
    """Return the answers of the highest mean log-probability, the best first, numbered from 0."""
    ranked = sorted(completions, key=lambda c: -c.cumulative_logprob / max(len(c.token_ids), 1))[:count]
    for index, completion in enumerate(ranked):
        completion.index = index
    return ranked


@dataclass(slots=True)
class Delta:
    """What is new in one answer since the event before."""

    index: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One event of a request. The texts of all deltas of an answer concatenate to its full text."""

    request_id: str
    prompt_token_ids: Sequence[int]
    deltas: tuple[Delta, ...]
    """New parts of answers. With `best_of` over `n` there are none before the end."""
    completions: tuple[Completion, ...]
    """All answers so far; with `finished`, the chosen ones in order."""
    finished: bool = False
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    """One for each prompt token, None for the first. Set once the prompt was computed."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    error: str | None = None
    """Why the request failed, with finish reason `error`."""
    scheduled_at: float | None = None
    """`time.perf_counter()` when the request left the queue."""


def check_request(request: Request, *, vocab_size: int, max_context: int, has_tokenizer: bool) -> None:
    """Raise `RequestError` for a request that an engine of this vocabulary and context cannot serve."""
    params, length = request.params, len(request.prompt)
    if length == 0:
        raise RequestError("the prompt is empty", fix="start it with the document boundary token", parameter="prompt")
    for name, ids in (
        ("prompt", request.prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise RequestError(f"{name} has token {wrong}", fix=f"use ids from 0 to {vocab_size - 1}", parameter=name)
    asked = params.max_tokens or 1
    if length + asked > max_context:
        room = max_context - length
        raise RequestError(
            f"the prompt has {length} tokens and {asked} more are asked for; the context holds {max_context}",
            fix="shorten the prompt" + (f", or ask for at most {room} tokens" if room > 0 else ""),
            parameter="prompt",
            code="context_length_exceeded",
        )
    if params.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer", fix="give Engine a tokenizer", parameter="stop")
    if request.constraints and len(request.constraints) != params.draws:
        raise RequestError(
            "there must be one constraint for each answer", fix=f"give {params.draws}", parameter="constraints"
        )
