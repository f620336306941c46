"""Evaluate any model folder with EleutherAI's evaluation harness (`lm-eval`).

The three requests of the harness (log-likelihoods of continuations and of documents, greedy continuations) are answered
by a `Scorer`, so that documents have the same bits as in `evaluate bpb` and questions the same answers as in
`multiple_choice`. The model is registered with the harness as `piledriver`; the harness's own command line with it is

    python -m piledriver.evaluate.harness run --model piledriver --model_args pretrained=run/model --tasks TASK

and `piledriver evaluate lm-eval` is the short form.
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
from piledriver.evaluate.bits import bits_per_byte
from piledriver.evaluate.choices import encode_pair
from piledriver.evaluate.open_model import open_model_tokenizer, open_scorer
from piledriver.evaluate.scorers import Scorer
from piledriver.evaluate.windows import batches, continuation_window
from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.collectives.operations import gather, gather_object
from piledriver.runtime.world import World

NAME = "piledriver"


class HarnessModel:
    """The harness's model interface over a `Scorer`.

    `boundary` starts each context with the document boundary token, as in training; without it the figures of GPT-2 and
    similar models equal those of the harness's `hf`.
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
        unknown = set(theirs) - {"batch_size", "max_batch_size"}  # replaced by `batch_tokens`
        if unknown:
            raise UsageError(f"the model has no argument {sorted(unknown)[0]!r}", fix="see piledriver.evaluate.harness")
        self._world = world or World()
        # The harness's command line passes "cuda" by default, on any machine.
        absent = device is None or (device.startswith("cuda") and not torch.cuda.is_available())
        chosen = None if absent else torch.device(device)  # type: ignore[arg-type]
        self._scorer = scorer or open_scorer(pretrained, length=length, device=chosen)
        opened = tokenizer if isinstance(tokenizer, Tokenizer) else open_model_tokenizer(pretrained, tokenizer)
        self._tokenizer, self._context, self._batch_tokens, self._boundary = opened, context, batch_tokens, boundary

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy decoding yields it) of each continuation after its context."""
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
        """Return the log-likelihood of each document, every token scored once."""
        documents = [Document(request.args[0]) for request in requests]
        scores = bits_per_byte(
            self._scorer, self._tokenizer, documents, context=self._context, batch_tokens=self._batch_tokens
        )
        return [-score.nats for score in scores]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each context, up to the first of its stop texts."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, options: dict[str, Any]) -> str:
        if options.get("do_sample") and options.get("temperature", 1.0) != 0:
            raise UsageError("the task samples its answers", fix="pass gen_kwargs do_sample=False")
        stops = _texts(options.get("until"))
        most = min(int(options.get("max_gen_toks", 256)), self._scorer.length - 1)
        end = self._tokenizer.boundary()
        ids = [*([end] if self._boundary or not context else []), *self._tokenizer.encode(context).tolist()]

        def is_done(drawn: list[int]) -> bool:
            return bool(drawn) and (drawn[-1] == end or any(stop in self._tokenizer.decode(drawn) for stop in stops))

        drawn = self._scorer.greedy(ids[-(self._scorer.length - most) :], most, is_done)
        text = self._tokenizer.decode(drawn[: drawn.index(end)] if end in drawn else drawn)
        return min((text.split(stop)[0] for stop in stops), key=len, default=text)

    @property
    def tokenizer_name(self) -> str:
        """Return the key of the request cache."""
        return self._tokenizer.fingerprint

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._scorer.device

    @property
    def rank(self) -> int:
        """Return the rank of this process; ranks share the requests."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated."""
        return gather(self._world, tensor.reshape(1) if tensor.ndim == 0 else tensor)  # type: ignore[no-any-return]

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on rank `dst`, None on others."""
        everything = gather_object(self._world, obj)
        return everything if self._world.rank == dst else None

    def barrier(self) -> None:
        """Wait for all ranks."""
        barrier(self._world)


def _texts(until: str | Iterable[str] | None) -> list[str]:
    stops = [until] if isinstance(until, str) else list(until or [])
    return [stop for stop in stops if stop]


@cache
def model_class() -> Any:
    """Return `HarnessModel` as a subclass of the harness's base class, registered with the harness."""
    _lm_eval("models")  # registers the harness's own models, which it does only while the registry is empty
    base = _lm_eval("api.model").LM
    return _lm_eval("api.registry").register_model(NAME)(type("PiledriverLM", (HarnessModel, base), {}))


def _lm_eval(part: str) -> Any:
    try:
        return importlib.import_module(f"lm_eval.{part}")
    except ImportError as error:
        raise MissingDependencyError("lm_eval", extra="lm-eval", purpose="the evaluation harness") from error


def run_tasks(model: HarnessModel, tasks: Sequence[str], *, include: str | None = None, **options: Any) -> Any:
    """Return the harness's results on tasks; None on ranks other than 0.

    `include` is a folder with further task definitions; `options` go to `lm_eval.simple_evaluate`.
    """
    managers = _lm_eval("tasks").TaskManager
    # Indexing the harness's thousands of tasks is slow: avoid it if `include` has every task.
    manager = managers(include_path=include, include_defaults=False) if include else None
    if manager is None or not all(manager.match_tasks([task]) for task in tasks):
        manager = managers(include_path=include)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UsageError(f"the harness has no task {unknown[0]!r}", fix="see 'lm_eval ls tasks', or give --include")
    return _lm_eval("evaluator").simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, **options)


def main() -> None:
    """Run the harness's command line with our model registered."""
    model_class()
    _lm_eval("__main__").cli_evaluate()


if __name__ == "__main__":
    main()
