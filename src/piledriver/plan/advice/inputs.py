"""Rules about what surrounds the model: loader, tokeniser, checkpoints, trackers, padding, blocked threads."""

from __future__ import annotations

import math

from piledriver.observe.report.values import Advice
from piledriver.plan.advice.case import Case, milliseconds, share


def slow_loader(case: Case) -> Advice | None:
    """The step waits for the next batch: load it in other processes, ahead of its use."""
    waited = case.seconds("loader")
    rest = max(case.step - waited, 1e-9)
    workers = max(2, min(16, math.ceil(waited / rest) + 1))
    # Workers overlap with the step; on a CPU they also share its cores, which loading that waits does not need.
    return case.advice(
        "slow loader",
        "load batches in other processes, ahead of the step",
        f"a step waits {milliseconds(waited)} of {milliseconds(case.step)} for the loader ({share(waited, case.step)})",
        f"DataLoader(num_workers={workers}, prefetch_factor=4, persistent_workers=True"
        + (", pin_memory=True)" if case.on_device else ")"),
        max(rest, waited / workers),
    )


def slow_tokeniser(case: Case) -> Advice | None:
    """Text is tokenised inside the loop: tokenise once, before training."""
    waited = case.waited("tokeniser")
    return case.advice(
        "tokeniser in the loop",
        "tokenise once, before training",
        f"a step waits {milliseconds(waited)} for the tokeniser ({share(waited, case.step)})",
        "piledriver tokenize CORPUS --tokenizer T -o TOKENS, or datasets.map(tokenise) beforehand",
        case.step - waited,
    )


def checkpoint_stall(case: Case) -> Advice | None:
    """Steps wait while a checkpoint is written: copy the state, and write it in the background."""
    waited = case.seconds("checkpoint")
    calls = sum(row.calls for row in case.rank.input_output if row.name == "checkpoint")
    owners = [one for peak in case.rank.memory for one in peak.owners]
    state = sum(one.bytes for one in owners if one.category in ("parameter", "optimizer state"))
    # The copy of the state into host memory stays.
    rate = case.cluster.host.link if case.on_device else case.cluster.device.bandwidth / 2
    copy = calls / case.rank.steps * state / rate
    return case.advice(
        "checkpoint stall",
        "write checkpoints in the background",
        f"{calls} checkpoint(s) in {case.rank.steps} steps stop a step for {milliseconds(waited)} on average "
        f"({share(waited, case.step)})",
        "torch.distributed.checkpoint.async_save, or piledriver train, whose saves are asynchronous; save less often",
        case.step - waited + copy,
    )


def tracker_cost(case: Case) -> Advice | None:
    """Logging blocks the step: log less often, or through a queue."""
    waited = case.waited("tracker")
    return case.advice(
        "tracker",
        "log less often, or in the background",
        f"a step waits {milliseconds(waited)} for trackers ({share(waited, case.step)})",
        "log every 10 steps; piledriver's TrackerHub logs from a thread of its own",
        case.step - 0.9 * waited,
    )


def padding_waste(case: Case) -> Advice | None:
    """Most tokens are padding: pack sequences, or sort them by length."""
    tokens, padding = case.batches.get("tokens", 0.0), case.batches.get("padding", 0.0)
    if not tokens or padding / tokens < 0.1:
        return None
    wasted = padding / tokens
    optimizer = case.per_step("optimizer_seconds")
    # The optimizer's time does not depend on tokens.
    device = max(0.0, case.seconds("compute") - optimizer)
    if not case.on_device:  # the profiler slows a CPU's operators down as it does the whole step
        device *= case.step / case.profiled
    return case.advice(
        "padding",
        "pack sequences instead of padding them",
        f"{share(padding, tokens)} of the tokens are padding",
        "concatenate documents (piledriver tokenize packs them), or batch sequences of similar length",
        max(case.step - wasted * device, case.launching),
    )


def blocked_thread(case: Case) -> Advice | None:
    """The loop's thread sleeps outside of any known part."""
    # Parts that are no cause of their own, such as trackers, are idle time too, and have rules of their own.
    named = sum(row.waited_seconds for row in case.rank.input_output if row.name not in ("loader", "checkpoint"))
    idle = case.seconds("idle") - named / case.rank.steps
    if case.on_device or idle < 0.1 * case.step:
        return None
    return case.advice(
        "blocked thread",
        "find what the loop waits for outside the model",
        f"the loop's thread is blocked for {milliseconds(idle)} of a step ({share(idle, case.step)}), outside loader, "
        "checkpoint and collectives",
        "mark suspected parts with piledriver.observe.region(name) and profile again; move the wait to a thread",
        case.step - idle,
    )
