"""Blocks of timm and diffusers: fused and compiled to one graph for each kind, none in the second step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piledriver.engine.apply import apply_compute
from piledriver.engine.compile import compile_report, reset_compiler
from piledriver.engine.fused.report import report_of
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.options import EngineOptions

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, at import and in every call

Given = Callable[[int], dict[str, Any]]


def _timm(name: str, size: int, argument: str = "x") -> Callable[[], tuple[nn.Module, Given]]:
    def make() -> tuple[nn.Module, Given]:
        timm: Any = pytest.importorskip("timm", reason="timm is not installed")
        model = timm.create_model(
            name, pretrained=False, num_classes=10, **({"img_size": size} if "vit" in name else {})
        )
        return model, lambda rows: {argument: torch.randn(rows, 3, size, size)}

    return make


def _dit() -> tuple[nn.Module, Given]:
    diffusers: Any = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return model, lambda rows: {
        "hidden_states": torch.randn(rows, 4, 8, 8),
        "timestep": torch.randint(10, (rows,)),
        "class_labels": torch.randint(10, (rows,)),
    }


def _flux() -> tuple[nn.Module, Given]:
    diffusers: Any = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return model, lambda rows: {
        "hidden_states": torch.randn(rows, 16, 4),
        "encoder_hidden_states": torch.randn(rows, 5, 32),
        "pooled_projections": torch.randn(rows, 32),
        "timestep": torch.rand(rows),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(5, 3),
    }


# Name to (model, kinds of blocks).
CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Given]], int]] = {
    "timm vit": (_timm("vit_tiny_patch16_224", 64), 1),
    "timm resnet": (_timm("resnet18", 64), 4),
    "diffusers DiT": (_dit, 1),
    # Single-stream blocks but the first take a slice of what the one before returned.
    "diffusers Flux": (_flux, 3),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_compiler()
    yield
    reset_compiler()


@pytest.mark.parametrize("name", list(CASES))
def test_one_graph_for_each_kind_of_block_and_one_more_for_further_sizes(name: str) -> None:
    make, kinds = CASES[name]
    torch.manual_seed(0)
    model, given = make()
    mesh = make_mesh(Layout(fuse=True, compile=True, precision="bf16"), "cpu")
    apply_compute(model.train(), mesh, EngineOptions(compile={"backend": "eager"}))
    graphs = []
    for rows in (2, 2, 3, 4):
        out: Any = model(**given(rows))
        out = out if isinstance(out, Tensor) else out.sample
        out.float().square().mean().backward()
        graphs.append(compile_report().graphs)
    assert graphs[0] == graphs[1] == kinds
    assert graphs[2] == graphs[3] <= 2 * kinds + 1
    assert not compile_report().breaks
    report = report_of(model)
    assert report is not None
    assert report.replaced
