"""Optimizers by name: from here, from another package, and what each can do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from piledriver.core.config import load_config, to_yaml
from piledriver.core.errors import ConfigError, PiledriverError
from piledriver.optim import (
    OPTIMIZERS,
    Lion,
    Muon,
    OptimizerConfig,
    SplitMasterAdamW,
    build_optimizer,
    can_skip_on_device,
    capabilities,
)

from ..train.corpus import make_tokens

PLUGIN = """
import torch

class SignSGD(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, params, lr, *, scale: float = 1.0):
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        print("SignSGD", self.defaults["scale"])
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * group["scale"])
"""
CONFIG = """
model: {{vocab_size: 512, dim: 32, layers: 1, heads: 2, max_positions: 32}}
data: {{tokens: {tokens}}}
batch_tokens: 64
budget_tokens: 128
trackers: []
plots: false
optimizer: {{kind: sign_sgd, lr: 0.01, settings: {{scale: 0.5}}}}
"""


@pytest.mark.slow
def test_an_optimizer_of_another_package_trains(tmp_path: Path) -> None:
    plugin = tmp_path / "site"
    info = plugin / "plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (plugin / "plugin_module.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[piledriver.optimizer]\nsign_sgd = plugin_module:SignSGD\n")
    (tmp_path / "config.yaml").write_text(CONFIG.format(tokens=make_tokens(tmp_path, documents=20)))
    path = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "piledriver.cli.main", "train", "config.yaml"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("SignSGD 0.5") == 2


def test_an_unknown_name_is_rejected_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.yaml"
    path.write_text("kind: adamv\n")
    with pytest.raises(ConfigError, match=r"optimizer.yaml.*unknown optimizer 'adamv'.*did you mean 'adamw'"):
        load_config(OptimizerConfig, path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nesterof": False}, "did you mean 'nesterov'"),
        ({"nesterov": 3}, "it must be true or false"),
        ({"lr": 1}, "lr"),
    ],
    ids=str,
)
def test_settings_are_those_of_the_optimizer(settings: dict[str, object], message: str) -> None:
    with pytest.raises(PiledriverError, match=message):
        OptimizerConfig(kind="muon", settings=settings)


def test_settings_reach_the_optimizer() -> None:
    config = OptimizerConfig(kind="muon", momentum=0.8, settings={"nesterov": False, "adjust": "original"})
    group = build_optimizer(nn.Linear(2, 2), config).param_groups[0]
    assert (group["momentum"], group["nesterov"], group["adjust"]) == (0.8, False, "original")
    assert to_yaml(config).count("nesterov") == 1


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_every_optimizer_can_be_built_and_stepped(kind: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, OptimizerConfig(kind=kind))
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize(("old", "new"), [("adamw_master", "fp32"), ("adamw_master_bf16", "bf16")])
def test_names_of_version_0_1_still_work(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match="adamw_split"):
        config = OptimizerConfig(kind=old)
    optimizer = build_optimizer(nn.Linear(2, 2), config)
    assert isinstance(optimizer, SplitMasterAdamW)
    assert optimizer.param_groups[0]["moments"] == new
    assert config == OptimizerConfig(kind=config.kind)


class Renamed(torch.optim.AdamW):
    """torch's update under another name."""


class Changed(torch.optim.AdamW):
    """Another update."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


def test_torch_classes_have_capabilities_and_their_subclasses_only_with_the_same_step() -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    for optimizer, elementwise in [
        (torch.optim.AdamW(weights), True),
        (Renamed(weights), True),
        (Changed(weights), False),
        (torch.optim.LBFGS(weights), False),
        (Lion(weights), True),
        (Muon(weights), False),
    ]:
        assert capabilities(optimizer).elementwise is elementwise, optimizer
    assert capabilities(Muon(weights)).per_parameter
    assert capabilities(SplitMasterAdamW(weights)).clips_in_step


def test_an_attribute_of_the_instance_overrides_its_class() -> None:
    optimizer = Lion([nn.Parameter(torch.ones(2))])
    assert can_skip_on_device(optimizer, torch.device("cpu"))
    optimizer.skips_on_device = False  # as the engine does where it replaces the step
    assert not can_skip_on_device(optimizer, torch.device("cpu"))
