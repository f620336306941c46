"""Our models, and any checkpoint folder, under EleutherAI's evaluation harness (`lm-eval`).

The harness asks for three things: log-likelihoods of continuations, of whole documents, and greedy continuations. They
are answered here from a `Scorer`, so a document costs the same bits as in `evaluate bpb` and a question has the same
answer as in `multiple_choice`.

In its registry the model is called `piledriver`. The harness's own command knows only the models it ships with, so:

    python -m piledriver.evaluate.harness run --model piledriver --model_args pretrained=run/model --tasks TASK

is its command line with ours added; `piledriver evaluate lm-eval` is the short form.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from piledriver.core.errors import MissingDependencyError, UsageError
from piledriver.corpus import Document
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.evaluate.batches import batches
from piledriver.evaluate.bits import bits_per_byte
from piledriver.evaluate.choices import encode_pair
from piledriver.evaluate.open_model import open_model_tokenizer, open_scorer
from piledriver.evaluate.scorers import Scorer
from piledriver.evaluate.windows import continuation_window
from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.collectives.operations import gather, gather_object
from piledriver.runtime.world import World

NAME = "piledriver"


class HarnessModel:
    """What the harness calls a model. `boundary` says whether a context begins with the token between documents.

    It does by default, as in training; without it figures of GPT-2 and its like equal those of the harness's `hf`.
    """

    def __init__(
        self,
        pretrained: str = "",
        *,
        tokenizer: str | Tokenizer | None = None,
        scorer: Scorer | None = None,
        length: int | None = None,
        context: int = 1,
        batch_tokens: int = 8192,
        boundary: bool = True,
        device: str | None = None,
        world: World | None = None,
        **theirs: Any,
    ) -> None:
        super().__init__()
        unknown = set(theirs) - {"batch_size", "max_batch_size"}  # `batch_tokens` does their work
        if unknown:
            raise UsageError(f"the model has no argument {sorted(unknown)[0]!r}", fix="see piledriver.evaluate.harness")
        self._world = world or World()
        # The harness's command line says "cuda" where nothing was said, on any machine.
        absent = device is None or (device.startswith("cuda") and not torch.cuda.is_available())
        chosen = None if absent else torch.device(device)  # type: ignore[arg-type]
        self._scorer = scorer or open_scorer(pretrained, length=length, device=chosen)
        opened = tokenizer if isinstance(tokenizer, Tokenizer) else open_model_tokenizer(pretrained, tokenizer)
        self._tokenizer, self._context, self._batch_tokens, self._boundary = opened, context, batch_tokens, boundary

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each continuation after its context."""
        windows = []
        for at, (context, continuation) in enumerate(request.args for request in requests):
            before, after = encode_pair(self._tokenizer, context, continuation)
            prefix = [self._tokenizer.boundary()] if self._boundary or not before else []
            windows.append(continuation_window(at, [*prefix, *before], after, self._scorer.length))
        answers = [(0.0, False)] * len(windows)
        for batch, inputs, targets in batches(windows, self._batch_tokens, self._scorer.device):
            losses, hits = self._scorer.losses_and_matches(inputs, targets)
            sums, greedy = losses.double().sum(dim=1).tolist(), hits.all(dim=1).tolist()
            for window, nats, best in zip(batch, sums, greedy, strict=True):
                answers[window.document] = (-nats, best)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each document, every token once."""
        documents = [Document(request.args[0]) for request in requests]
        scores = bits_per_byte(
            self._scorer, self._tokenizer, documents, context=self._context, batch_tokens=self._batch_tokens
        )
        return [-score.nats for score in scores]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each context's likeliest continuation, up to the first of its stop texts."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, wishes: dict[str, Any]) -> str:
        if wishes.get("do_sample") and wishes.get("temperature", 1.0) != 0:
            raise UsageError("the task draws its answers at random", fix="pass gen_kwargs do_sample=False")
        stops = _texts(wishes.get("until"))
        most = min(int(wishes.get("max_gen_toks", 256)), self._scorer.length - 1)
        end = self._tokenizer.boundary()
        ids = [*([end] if self._boundary or not context else []), *self._tokenizer.encode(context).tolist()]

        def is_done(drawn: list[int]) -> bool:
            return bool(drawn) and (drawn[-1] == end or any(stop in self._tokenizer.decode(drawn) for stop in stops))

        drawn = self._scorer.greedy(ids[-(self._scorer.length - most) :], most, is_done)
        text = self._tokenizer.decode(drawn[: drawn.index(end)] if end in drawn else drawn)
        return min((text.split(stop)[0] for stop in stops), key=len, default=text)

    @property
    def tokenizer_name(self) -> str:
        """What requests are cached under."""
        return self._tokenizer.fingerprint

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._scorer.device

    @property
    def rank(self) -> int:
        """This process among those that share the requests."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """How many share them."""
        return self._world.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor from every process."""
        return gather(self._world, tensor.reshape(1) if tensor.ndim == 0 else tensor)  # type: ignore[no-any-return]

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """An object from every process, for one of them."""
        everything = gather_object(self._world, obj)
        return everything if self._world.rank == dst else None

    def barrier(self) -> None:
        """Wait for the others."""
        barrier(self._world)


def _texts(until: str | Iterable[str] | None) -> list[str]:
    stops = [until] if isinstance(until, str) else list(until or [])
    return [stop for stop in stops if stop]


@cache
def model_class() -> Any:
    """`HarnessModel` as a subclass of the harness's own base, entered in its registry."""
    _lm_eval("models")  # the harness enters its own only while the registry is empty
    base = _lm_eval("api.model").LM
    return _lm_eval("api.registry").register_model(NAME)(type("PiledriverLM", (HarnessModel, base), {}))


def _lm_eval(part: str) -> Any:
    try:
        return importlib.import_module(f"lm_eval.{part}")
    except ImportError as error:
        raise MissingDependencyError("lm_eval", extra="lm-eval", purpose="the evaluation harness") from error


def run_tasks(model: HarnessModel, tasks: Sequence[str], *, include: str | None = None, **options: Any) -> Any:
    """The harness's results on some tasks; None on processes other than the main one.

    `include` is a folder with tasks of one's own; `options` go to `lm_eval.simple_evaluate`.
    """
    managers = _lm_eval("tasks").TaskManager
    # Reading the names of its thousands of tasks takes seconds: not where a folder of one's own has all that is asked.
    manager = managers(include_path=include, include_defaults=False) if include else None
    if manager is None or not all(manager.match_tasks([task]) for task in tasks):
        manager = managers(include_path=include)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UsageError(f"the harness knows no task {unknown[0]!r}", fix="see 'lm_eval ls tasks', or give --include")
    return _lm_eval("evaluator").simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, **options)


def main() -> None:
    """The harness's own command line, with our model in its registry."""
    model_class()
    _lm_eval("__main__").cli_evaluate()


if __name__ == "__main__":
    main()
