"""Predicted collectives and bytes are those that gloo ranks exchange and hold, for every axis.

torch's Flight Recorder counts collectives. It does not record gloo's sends, which are counted where torch makes them.
Gloo has no reduce-scatter of its own: torch runs it as an all-reduce of the whole buffer.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from piledriver.engine.apply import apply, apply_optimizer
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.optimizer.parameter_map import ParameterMap
from piledriver.engine.state import state_of
from piledriver.models import LatentAttentionConfig, Transformer
from piledriver.models.config import ModelConfig, MoEConfig
from piledriver.optim import OptimizerConfig, build_optimizer
from piledriver.optim.shards import local
from piledriver.plan.blocks.parameters import stages_of_layout
from piledriver.plan.collectives import step_collectives
from piledriver.plan.memory.states import stage_total
from piledriver.plan.memory.timeline import step_timelines
from piledriver.plan.time.links import axes_of_layout
from tests.checkpoint.processes import run as on_ranks

ROWS, LENGTH = 4, 32
DENSE = ModelConfig(vocab_size=300, dim=32, layers=3, heads=4, kv_heads=2, mlp_dim=64, max_positions=LENGTH, tied=False)
TIED = replace(DENSE, tied=True)
EXPERTS = ModelConfig(vocab_size=64, dim=32, layers=2, heads=4, mlp_dim=32, max_positions=LENGTH, moe=MoEConfig())
LATENT = ModelConfig(
    vocab_size=64, dim=32, layers=2, heads=4, head_dim=12, mlp_dim=64, max_positions=LENGTH,
    latent=LatentAttentionConfig(kv_rank=16, rope_dim=4, value_dim=8, q_rank=16),
    moe=MoEConfig(experts=4, expert_dim=64, shared_dim=64, dense_layers=(0,)),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    layout: Layout
    config: ModelConfig = DENSE
    ranks: int = 2


CASES = [
    Case("zero0", Layout()),
    Case("zero1", Layout(zero=1)),
    Case("zero2", Layout(zero=2)),
    Case("zero3", Layout(zero=3)),
    Case("zero3-recomputed", Layout(zero=3, activations="full"), TIED),
    Case("tp", Layout(tp=2)),
    Case("tp-replicated-stream", Layout(tp=2, sequence_parallel=False), TIED),
    Case("tp-whole-vocabulary", Layout(tp=2, loss_parallel=False)),
    Case("tp-latent", Layout(tp=2), LATENT),
    Case("pp", Layout(pp=2, microbatches=2)),
    Case("pp-tied-uneven", Layout(pp=2, microbatches=4, stage_blocks=(1, 2)), TIED),
    Case("cp-ring", Layout(cp=2)),
    Case("cp-all-to-all", Layout(cp=2, cp_method="all-to-all")),
    Case("ep", Layout(ep=2), EXPERTS),
    Case("ep-zero3", Layout(ep=2, zero=3), EXPERTS),
    Case("zero3-tp", Layout(zero=3, tp=2), DENSE, 4),
    Case("zero3-hybrid", Layout(zero=3, dp_replicate=2), DENSE, 4),
    Case("zero2-hybrid", Layout(zero=2, dp_replicate=2), DENSE, 4),
    Case("zero1-pp", Layout(zero=1, pp=2, microbatches=2), DENSE, 4),
    Case("zero3-pp", Layout(zero=3, pp=2, microbatches=2), DENSE, 4),
    Case("tp-pp", Layout(tp=2, pp=2, microbatches=2), DENSE, 4),
    Case("cp-ring-of-4", Layout(cp=4), DENSE, 4),
    Case("ep-zero3-4", Layout(ep=2, zero=3), EXPERTS, 4),
]
Recorded = Counter[tuple[str, str, float]]
_DTYPES = {"Byte": 1, "Int": 4, "Float": 4, "Double": 8, "Long": 8}


def _bytes(sizes: list[list[int]], dtypes: list[str]) -> float:
    return float(sum(math.prod(size) * _DTYPES[dtype] for size, dtype in zip(sizes, dtypes, strict=True)))


def _recorded(after: int) -> tuple[Recorded, int]:
    """What the Flight Recorder saw after an entry, and the last entry."""
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
    found: Recorded = Counter()
    for entry in entries:
        if entry["record_id"] > after:
            kind = entry["profiling_name"].removeprefix("gloo:").replace("_", "-")
            sent, came = (_bytes(entry[f"{way}_sizes"], entry[f"{way}_dtypes"]) for way in ("input", "output"))
            if kind == "all-gather":
                came = sent * entry_ranks(entry)
            size = sent if kind == "all-to-all" else max(sent, came)
            found[kind, entry["process_group"][1].removeprefix("mesh_"), size] += 1
    return found, max((entry["record_id"] for entry in entries), default=-1)


def entry_ranks(entry: dict[str, Any]) -> int:
    """Ranks of an all-gather: by the group's name."""
    return int(dist.get_world_size(_group(entry["process_group"][0])))


def _group(name: str) -> Any:
    return next(group for group in dist.distributed_c10d._world.pg_names if _named(group) == name)


def _named(group: Any) -> str:
    return str(dist.distributed_c10d._world.pg_names[group])


class _Sends:
    """Counts the tensors that this rank sends to another."""

    def __init__(self) -> None:
        self.found: Recorded = Counter()
        # From the class's dictionary: the attribute would be an unbound function.
        self.plain = dist.ProcessGroup.__dict__["send"]
        self.call = dist.ProcessGroup.send

    def __enter__(self) -> Recorded:
        def send(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
            self.found["send", str(group.group_desc).removeprefix("mesh_"), float(tensors[0].nbytes)] += 1
            return self.call(group, tensors, *args)

        dist.ProcessGroup.send = send  # type: ignore[method-assign, assignment]
        return self.found

    def __exit__(self, *_: Any) -> None:
        dist.ProcessGroup.send = self.plain  # type: ignore[method-assign]


def _trained(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    mesh = make_mesh(case.layout, "cpu")
    model = Transformer(case.config, seed=1)
    optimizer = build_optimizer(model, OptimizerConfig(kind="adamw", lr=1e-3))
    before = dict(model.named_parameters())
    apply(model, mesh, device=torch.device("cpu"))
    now, replaced = dict(model.named_parameters()), ParameterMap()
    replaced.replaced.update({before[name]: new for name, new in now.items() if before[name] is not new})
    gone = {id(old) for name, old in before.items() if name not in now}
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if id(one) not in gone]
    apply_optimizer(optimizer, mesh, replaced)
    return model, optimizer, mesh


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any, config: ModelConfig) -> dict[str, float]:
    """One step; the bytes of weights, gradients and states of this rank."""
    generator = torch.Generator().manual_seed(mesh.data_rank)
    tokens = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=generator)
    known = state_of(model)
    if known is not None and known.pipeline is not None:
        known.pipeline.step(tokens, tokens)
    else:
        sums = model(tokens, tokens)
        (sums.total / sums.tokens).backward()
    steps = [one for group in optimizer.param_groups for one in group["params"]]
    gradients = [one.grad for one in (steps if mesh.layout.zero == 2 else model.parameters()) if one.grad is not None]
    held = {"weights": _held(model.parameters()), "gradients": _held(gradients), **_received(known)}
    optimizer.step()
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {**held, "states": _held(states)}


def _received(known: Any) -> dict[str, float]:
    """Bytes of the buffers that this rank's stages receive into."""
    if known is None or known.pipeline is None:
        return {}
    (_, stages), *_ = known.pipeline._built.values()
    return {
        name: _held(one.buffer for stage in stages for many in infos(stage).values() for one in many if _is_sent(one))
        for name, infos in (
            ("activations", lambda stage: stage.args_recv_info),
            ("gradients of activations", lambda stage: stage.grad_recv_info),
        )
    }


def _is_sent(one: Any) -> bool:
    return isinstance(getattr(one, "buffer", None), torch.Tensor)


def _held(tensors: Any) -> float:
    return float(sum(local(one.detach()).nbytes for one in tensors))


def _work(rank: int, names: list[str]) -> dict[str, tuple[Recorded, dict[str, float]]]:
    found = {}
    for case in CASES:
        if case.name not in names:
            continue
        model, optimizer, mesh = _trained(case)
        # The first step also infers shapes between stages.
        _step(model, optimizer, mesh, case.config)
        _, last = _recorded(-1)
        with _Sends() as sends:
            held = _step(model, optimizer, mesh, case.config)
        found[case.name] = _recorded(last)[0] + sends, held
    return found


@pytest.fixture(scope="module")
def measured() -> dict[str, list[tuple[Recorded, dict[str, float]]]]:
    """What each rank recorded and held, by case; one start of processes for each number of ranks."""
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):
        pytest.skip("this torch has no flight recorder for gloo")
    os.environ["TORCH_FR_BUFFER_SIZE"] = "4000"
    found: dict[str, list[tuple[Recorded, dict[str, float]]]] = {}
    for ranks in sorted({case.ranks for case in CASES}):
        names = [case.name for case in CASES if case.ranks == ranks]
        answers = on_ranks(ranks, _work, names)
        found |= {name: [answer[name] for answer in answers] for name in names}
    if not any(found["zero0"][0][0]):
        pytest.skip("this torch's flight recorder does not record gloo")
    return found


def _as_gloo(case: Case) -> Recorded:
    """The predicted collectives of all ranks, as gloo runs them and the recorder names them."""
    layout = case.layout.on(case.ranks)
    axes = axes_of_layout(layout)
    micro = (layout.microbatches or 1) if layout.pp > 1 else 1
    found: Recorded = Counter()
    for stage in range(layout.pp):
        for one in step_collectives(
            case.config,
            layout,
            length=LENGTH,
            sequences=ROWS // micro,
            accumulation=micro,
            pipeline_rank=stage,
            kind="cpu",
        ):
            kind = "all-reduce" if one.kind == "reduce-scatter" else one.kind
            name = {"expert_dp": "dp_shard"}.get(one.axis, one.axis)
            group = "default_pg" if axes[one.axis].size == case.ranks else name
            found[kind, group, one.bytes] += one.count * case.ranks // layout.pp
    return found


def _totals(found: Recorded) -> dict[tuple[str, str], tuple[int, float]]:
    """Calls and bytes by kind and group: rows sent to experts depend on the router, their sum over ranks does not."""
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for (kind, group, size), count in found.items():
        calls, total = totals.get((kind, group), (0, 0.0))
        totals[kind, group] = calls + count, total + count * size
    return totals


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_collectives_are_those_that_the_flight_recorder_saw(case: Case, measured: dict[str, Any]) -> None:
    seen = sum((recorded for recorded, _ in measured[case.name]), Counter())
    said = _as_gloo(case)
    if case.layout.ep > 1:
        assert _totals(said) == _totals(seen)
    else:
        assert said == seen


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_are_those_that_ranks_hold(case: Case, measured: dict[str, Any]) -> None:
    layout = case.layout.on(case.ranks)
    stages, per = stages_of_layout(case.config, layout), case.ranks // layout.pp
    for pipeline_rank in range(layout.pp):
        stage = stages[pipeline_rank]
        if case.config.tied and stage.last and not stage.first:
            continue  # a borrowed weight is no parameter of the last stage
        said = stage_total(case.config, stage, layout, "adamw")
        ranks = [held for _, held in measured[case.name][pipeline_rank * per : (pipeline_rank + 1) * per]]
        for name in ("weights", "gradients", "states"):
            largest = max(held[name] for held in ranks)
            assert getattr(said, name) == pytest.approx(largest, rel=0.01), name


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.layout.pp > 1], ids=lambda case: case.name)
def test_a_pipeline_has_a_buffer_for_each_micro_batch_that_it_receives(case: Case, measured: dict[str, Any]) -> None:
    layout = case.layout.on(case.ranks)
    micro = layout.microbatches or 1
    timelines = step_timelines(
        case.config,
        replace(layout, precision="fp32"),
        length=LENGTH,
        sequences=ROWS // micro,
        accumulation=micro,
        compiled=False,
        kind="cpu",
        every_rank=True,
    )
    for number, timeline in enumerate(timelines):
        said = {owner.name: owner.bytes for owner in timeline.phases[0].owners}
        _, held = measured[case.name][number * case.ranks // layout.pp]
        assert said["gradients from the next stage"] == held["gradients of activations"]
        # Of the others, what is not in flight: those are kept activations.
        in_flight = min(micro, layout.pp - number)
        share = 1 - in_flight / micro
        assert said["activations from the stage before"] == pytest.approx(share * held["activations"])
