"""Hooks, custom forwards, tied, frozen, quantised and adapted layers: handled, or left alone with the reason."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.accelerator import Accelerator
from piledriver.accelerator.prepare import suggest_layout
from piledriver.engine.fused import apply_fused
from piledriver.engine.fused.gains import gains_of
from piledriver.engine.fused.report import FuseReport, report_of
from piledriver.engine.fused.undo import unfuse
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from tests.engine.gpu import ON_GPU

WORDS = 50


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(dim)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, 24, bias=False), nn.Linear(dim, 24, bias=False)
        self.w2 = nn.Linear(24, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(dim), MLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Users(nn.Module):
    """A model that its user wrote, with a tied head and logits that leave it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def fused(model: nn.Module) -> FuseReport:
    apply_fused(model, make_mesh(Layout(fuse=True), "cpu"))
    report = report_of(model)
    assert report is not None
    return report


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    tokens = torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    F.cross_entropy(model(tokens[:, :-1]).reshape(-1, WORDS), tokens[:, 1:].reshape(-1)).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(model: nn.Module, original: nn.Module) -> None:
    torch.testing.assert_close(gradients(model), gradients(original), rtol=1e-5, atol=1e-6)


def test_a_users_model_and_loss_are_fused() -> None:
    model = Users()
    original = copy.deepcopy(model)
    report = fused(model)
    assert [(entry.operation, len(entry.modules)) for entry in report.replaced] == [
        ("norm", 3),
        ("norm", 1),
        ("gated MLP", 3),
        ("output layer and cross-entropy", 1),
    ]
    assert not report.left
    assert model.head.weight is model.embedding.weight
    same(model, original)
    gains = gains_of(original)
    assert gains is not None
    assert gains.startswith("compile 3 blocks, fuse 4 norms and 3 gated MLPs, and compute the loss without its logits")


def test_frozen_parameters_get_no_gradient() -> None:
    model = Users()
    model.blocks[0].requires_grad_(False)
    model.embedding.requires_grad_(False)
    original = copy.deepcopy(model)
    fused(model)
    same(model, original)
    assert gradients(model)["blocks.0.mlp.w2.weight"] is None


def test_hooked_layers_are_left_alone_and_hooks_are_called() -> None:
    model, seen = Users(), []
    model.blocks[1].mlp.w1.register_forward_hook(lambda *_: seen.append("before"))
    original = copy.deepcopy(model)
    report = fused(model)
    (left,) = report.left
    assert left.modules == ("blocks.1.mlp",)
    assert left.note == "w1: it has hooks"
    same(model, original)
    assert seen
    # A hook that comes later is called too.
    model.blocks[0].mlp.w2.register_forward_hook(lambda *_: seen.append("after"))
    gradients(model)
    assert "after" in seen


def test_custom_forwards_and_other_formulas_are_left_alone() -> None:
    model = Users()
    model.blocks[0].mlp.forward = types.MethodType(lambda self, x: self.w2(self.w1(x)), model.blocks[0].mlp)

    class Shifted(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1e-3

    class Gated(Norm):
        """As in Mamba 2: what its optional argument does is not seen in a trial."""

        def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
            return super().forward(x if gate is None else x * F.silu(gate))

    model.blocks[1].norm.__class__ = Shifted
    model.blocks[2].norm.__class__ = Gated
    original = copy.deepcopy(model)
    reasons = {entry.modules: entry.note for entry in fused(model).left}
    assert reasons["blocks.0.mlp",] == "its forward was replaced"
    assert "RMSNorm differs by" in reasons["blocks.1.norm",]
    assert reasons["blocks.2.norm",] == "its forward also takes gate"
    same(model, original)


def test_quantised_and_adapted_layers_are_left_alone() -> None:
    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.delta = layer, nn.Parameter(torch.zeros(layer.weight.shape))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base_layer(x) + F.linear(x, self.delta)
            return out

    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype) * 0.1)

    model = Users()
    model.blocks[0].mlp.w1 = Adapted(model.blocks[0].mlp.w1)
    layer = Quantised(16, 24, bias=False)
    layer.weight = nn.Parameter(torch.randint(-8, 8, (24, 16), dtype=torch.int8), requires_grad=False)
    model.blocks[1].mlp.w3 = layer
    original = copy.deepcopy(model)
    reasons = {entry.modules: entry.note for entry in fused(model).left}
    assert reasons["blocks.0.mlp",].startswith("w1: it is a")
    assert reasons["blocks.1.mlp",].startswith("w3: it is a")
    same(model, original)


def test_peft_adapters_train_as_without() -> None:
    peft: Any = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from tests.engine.fused.catalogue import batch, build

    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "gate_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(build("llama"), adapters)
    original = copy.deepcopy(model)
    report = fused(model)
    assert any(entry.note.startswith("gate_proj: it is a peft") for entry in report.left)
    losses = [one(**batch("llama")).loss for one in (model, original)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_what_users_do_to_models_of_transformers_before(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.engine.fused.catalogue import batch, build

    def checkpointed(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()

    for change in (
        lambda model: model.gradient_checkpointing_enable(),
        checkpointed,
        lambda model: model.resize_token_embeddings(101),
        lambda model: model.get_output_embeddings().requires_grad_(False),
    ):
        model: Any = build(name)
        change(model)
        original = copy.deepcopy(model)
        fused(model)
        found = []
        for one in (model, original):
            # A tuple, as older loops ask for.
            loss = one(**batch(name), return_dict=False)[0]
            loss.backward()
            found.append((loss.detach(), {key: p.grad for key, p in one.named_parameters() if p.grad is not None}))
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_copies_pickles_and_undoing() -> None:
    model = Users()
    original = copy.deepcopy(model)
    fused(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.norm.weight.zero_()
    same(model, original)
    same(pickle.loads(pickle.dumps(model)), original)
    unfuse(model)
    assert not any("forward" in vars(module) for module in model.modules())
    same(model, original)


def test_what_is_left_under_other_layouts_is_said() -> None:
    for layout, reason in (
        ({"compile": "model"}, "no submodule holds all blocks"),
        ({"pp": 2}, "the last stage of a pipeline returns its logits"),
        ({"tp": 2}, "tp 2 has the output layer and MLPs: they compute on shards"),
    ):
        mesh: Any = types.SimpleNamespace(layout=Layout(fuse=True, **layout), device_type="cpu", alone=False)  # type: ignore[arg-type]
        report = report_of(apply_fused(Users(), mesh))
        assert reason in str(report)


def test_describe_and_free_memory(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True, layout=Layout(fuse=True))
    model = accelerator.prepare(Users())
    assert accelerator.describe(model).replaced
    assert "gated MLP: 3 x MLP (blocks.{0-2}.mlp): SwiGLU" in capsys.readouterr().out
    accelerator.free_memory()
    assert report_of(model) is None
    accelerator.describe(model)
    assert "not prepared" in capsys.readouterr().out
    for layout, reason in (
        (Layout(fuse=False), "not looked at: Layout(fuse=False)"),
        (Layout(), "elsewhere with Layout(fuse=True)"),
        (None, "prepared without a layout: Accelerator(layout="),
    ):
        accelerator = Accelerator(cpu=True, layout=layout)
        accelerator.describe(accelerator.prepare(Users()))
        assert reason in capsys.readouterr().out


def test_the_hint_names_what_a_layout_would_do_and_the_line_to_write(caplog: pytest.LogCaptureFixture) -> None:
    suggest_layout(Users())
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert "Accelerator(layout=Layout(precision='bf16'))" in line
    assert "To compile 3 blocks, fuse 4 norms and 3 gated MLPs, and compute the loss without its logits" in line
    caplog.clear()
    suggest_layout(nn.Linear(2, 2))
    assert not caplog.records


class TestOnGpu:
    pytestmark = ON_GPU

    def test_a_loop_without_a_layout_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        accelerator = Accelerator()
        accelerator.prepare(Users(), Users())
        said = [record.getMessage() for record in caplog.records if "trains as it is" in record.getMessage()]
        assert len(said) == 1
        caplog.clear()
        Accelerator(layout=Layout(precision="bf16", compile=False)).prepare(Users())
        assert not [record for record in caplog.records if "trains as it is" in record.getMessage()]
