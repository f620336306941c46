"""Accelerate's FSDP plugin, ParallelismConfig and TP plugin as layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piledriver.accelerator import Accelerator
from piledriver.accelerator.errors import OptionError
from piledriver.accelerator.options.plugins import layout_from_plugins
from piledriver.compat.accelerate.parallelism_config import ParallelismConfig
from piledriver.compat.accelerate.utils.dataclasses import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin
from piledriver.engine import Layout, LayoutError
from piledriver.runtime import environment
from piledriver.runtime.world import World

NODES = World(rank=0, size=16, local_rank=0, local_size=8)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({}, Layout(zero=3)),
        ({"fsdp_version": 2, "reshard_after_forward": False}, Layout(zero=2)),
        ({"fsdp_version": 1, "reshard_after_forward": "FULL_SHARD"}, Layout(zero=3)),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, Layout(zero=2)),
        ({"sharding_strategy": 3}, Layout()),
        ({"sharding_strategy": "HYBRID_SHARD"}, Layout(zero=3, dp_shard=8)),
        ({"sharding_strategy": SimpleNamespace(name="_HYBRID_SHARD_ZERO2")}, Layout(zero=2, dp_shard=8)),
        (
            {"cpu_offload": True, "activation_checkpointing": True},
            Layout(zero=3, offload="parameters", activations="full"),
        ),
        ({"mixed_precision_policy": SimpleNamespace(param_dtype=torch.bfloat16)}, Layout(zero=3, precision="bf16")),
        ({"mixed_precision_policy": {"param_dtype": torch.float16}}, Layout(zero=3, precision="fp16")),
    ],
)
def test_fsdp(options: dict[str, Any], layout: Layout) -> None:
    assert layout_from_plugins(None, NODES, fsdp_plugin=FullyShardedDataParallelPlugin(**options)) == layout


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ({"dp_replicate_size": 16}, Layout(dp_replicate=16)),
        ({"dp_shard_size": 16}, Layout(zero=3, dp_replicate=1, dp_shard=16)),
        ({"dp_shard_size": -1, "tp_size": 2}, Layout(zero=3, tp=2)),
        ({"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 2}, Layout(zero=3, dp_replicate=2, dp_shard=4, tp=2)),
        ({"cp_size": 4, "dp_shard_size": 4}, Layout(zero=3, dp_replicate=1, dp_shard=4, cp=4)),
        ({"sp_size": 4, "dp_shard_size": 4}, Layout(zero=3, dp_replicate=1, dp_shard=4, cp=4, cp_method="all-to-all")),
        ({"tp_size": 16}, Layout(dp_replicate=1, tp=16)),
    ],
)
def test_sizes_of_axes(sizes: dict[str, int], layout: Layout) -> None:
    made = layout_from_plugins(None, NODES, parallelism=ParallelismConfig(**sizes))
    assert made == layout
    # What they multiply to is the number of processes, so the layout fits.
    assert made is not None
    assert made.on(16).on(16) == layout.on(16)


def test_both_together_and_the_older_spelling() -> None:
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=False)
    sizes = ParallelismConfig(dp_shard_size=8, tp_size=2)
    made = layout_from_plugins(None, NODES, fsdp_plugin=plugin, parallelism=sizes)
    assert made == Layout(zero=2, dp_replicate=1, dp_shard=8, tp=2)
    made = layout_from_plugins(None, NODES, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=4))
    assert made == Layout(tp=4)


def test_what_contradicts_is_refused() -> None:
    with pytest.raises(OptionError, match="both layout and fsdp_plugin"):
        Accelerator(cpu=True, layout=Layout(), fsdp_plugin=FullyShardedDataParallelPlugin())
    with pytest.raises(OptionError, match="unknown sharding strategy 'SOME'"):
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(sharding_strategy="SOME"))
    with pytest.raises(LayoutError, match=r"mixed_precision is 'bf16', the layout's precision is 'fp8'"):
        Accelerator(cpu=True, mixed_precision="bf16", layout=Layout(precision="fp8"))


def test_what_the_launcher_set_is_read() -> None:
    from piledriver.compat.accelerate.accelerator import Accelerator as Compatible
    from piledriver.compat.accelerate.state import AcceleratorState, GradientState

    try:
        with environment.patched(ACCELERATE_USE_FSDP="true", FSDP_RESHARD_AFTER_FORWARD="false"):
            assert Compatible(cpu=True).layout == Layout(zero=2).on(1)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def test_one_process_with_a_layout_trains_as_without() -> None:
    losses = []
    for layout in (None, Layout(), Layout(zero=3, activations="full")):
        torch.manual_seed(0)
        run = Accelerator(cpu=True, layout=layout)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(3):
            loss = model(torch.ones(2, 3)).square().mean()
            run.backward(loss)
            run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        assert run.memory_report().optimizer_state >= 8 * sum(p.numel() for p in model.parameters())
    assert losses[0] == losses[1] == losses[2]
