"""Fused models compute what the originals compute: losses and every gradient, for each architecture."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piledriver.engine.apply import apply_compute
from piledriver.engine.compile import compile_report, reset_compiler
from piledriver.engine.fused.lazy_logits import LazyLogits
from piledriver.engine.fused.output_layer import bodies_of
from piledriver.engine.fused.report import report_of
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.options import EngineOptions
from piledriver.models.interchange.families import family_names
from tests.engine.gpu import ON_GPU

pytest.importorskip("transformers")

from tests.engine.fused.catalogue import ALL, CAUSAL, FURTHER, IMAGES, batch, build, losses_of

pytestmark = [
    # dynamo looks at the gradients of everything it guards, and expects that warnings are not errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Importing one of transformers' models compiles a function of it with TorchScript.
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]

WITHOUT_LOGITS = set(IMAGES)
"""Architectures that have no vocabulary."""


def fused(model: nn.Module, device: str = "cpu", **layout: Any) -> nn.Module:
    options = EngineOptions(compile={"backend": "aot_eager"} if layout.get("compile") else {})
    return apply_compute(model, make_mesh(Layout(fuse=True, **layout), device), options)


def loss_and_gradients(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Any]:
    output = model(**given)
    output.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), found, output.logits


def largest_gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    # The gradient of a key's bias is zero but for rounding: softmax does not see it.
    scale = max(float(gradient.norm()) for gradient in expected.values())
    return max(
        float((found[name] - gradient).norm() / max(float(gradient.norm()), 1e-3 * scale))
        for name, gradient in expected.items()
    )


@pytest.mark.parametrize("name", list(ALL))
def test_loss_and_gradients_are_those_of_the_original(name: str) -> None:
    model, given = build(name), batch(name)
    twin = fused(copy.deepcopy(model))
    assert list(twin.state_dict()) == list(model.state_dict())
    loss, gradients, logits = loss_and_gradients(twin, given)
    expected_loss, expected, expected_logits = loss_and_gradients(model, given)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert largest_gap(gradients, expected) < 1e-5
    report = report_of(twin)
    assert report is not None
    assert report.replaced
    if name not in WITHOUT_LOGITS:
        assert isinstance(logits, LazyLogits)
        assert not logits.product.read
    torch.testing.assert_close(logits.detach().clone() * 1.0, expected_logits.detach(), rtol=1e-4, atol=1e-5)


def test_every_family_that_we_read_is_here() -> None:
    import transformers

    known = {CAUSAL[name][0] for name in FURTHER}
    known |= {getattr(transformers, CAUSAL[name][0]).config_class.model_type for name in CAUSAL if name not in FURTHER}
    assert known == set(family_names())


losses_of_steps = functools.cache(losses_of)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_fifty_steps_lose_what_the_original_loses(name: str) -> None:
    plain = losses_of_steps(name, 50, precision="fp32")
    assert losses_of_steps(name, 50, precision="fp32", fuse=True) == pytest.approx(plain, rel=1e-3)
    assert plain[-1] < 0.7 * plain[0]


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_steps_in_bf16_stay_within_its_noise(precision: str) -> None:
    plain = losses_of_steps("llama", 20, precision="bf16")
    assert losses_of_steps("llama", 20, precision=precision, fuse=True) == pytest.approx(plain, rel=0.02)


def test_activation_policies_and_recomputed_norms_change_no_gradient() -> None:
    given = batch("llama")
    _, expected, _ = loss_and_gradients(fused(build("llama")), given)
    for layout in (
        {"activations": "full"},
        {"activations": "selective"},
        {"activations": "selective", "compile": True},
        {"recompute_norms": True, "compile": True},
    ):
        torch._dynamo.reset()
        _, found, _ = loss_and_gradients(fused(build("llama"), **layout), given)
        assert largest_gap(found, expected) < 1e-5, layout


def test_compiled_experts_keep_their_tokens_and_one_product() -> None:
    reset_compiler()
    model: Any = build("qwen3-moe", moe_intermediate_size=24)
    fused(model)
    experts = model.model.layers[0].mlp.experts
    # Autocast and norms make what experts read within the same graph.
    compute: Any = torch.compile(
        lambda x, index, w: experts(x * 1.0, index, w * 1.0), backend="aot_eager_decomp_partition"
    )
    x, weights = torch.randn(64, 32, requires_grad=True), torch.rand(64, 2, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        compute(x, torch.randint(4, (64, 2)), weights)
    rows = {tuple(one.shape) for one in kept if one.is_floating_point() and one.shape[0] > 64}
    assert rows == {(64 * 2 + 4 * 8, 2 * 24)}


def test_a_whole_compiled_model_computes_its_loss_without_logits() -> None:
    reset_compiler()
    model, given = build("llama"), batch("llama")
    twin = copy.deepcopy(model)
    mesh = make_mesh(Layout(fuse=True, compile="model"), "cpu")
    apply_compute(twin, mesh, EngineOptions(compile={"backend": "eager"}))
    loss, gradients, logits = loss_and_gradients(twin, given)
    expected_loss, expected, _ = loss_and_gradients(model, given)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert largest_gap(gradients, expected) < 1e-5
    assert isinstance(logits, LazyLogits)
    assert not logits.product.read
    assert str(compile_report()) == "1 graphs, 0 breaks, 0 recompiles"


def test_bodies_hold_the_blocks_and_not_the_output() -> None:
    for name, bodies in (("llama", ["model"]), ("bert", ["bert"]), ("t5", ["encoder", "decoder"]), ("bart", ["model"])):
        model: Any = build(name)
        found = bodies_of(model, model.get_output_embeddings())
        assert [key for key, module in model.named_modules() if any(module is one for one in found)] == bodies


def test_what_was_replaced_is_described() -> None:
    model = fused(build("llama"), precision="bf16")
    text = str(report_of(model))
    for line in (
        "norm: 5 x LlamaRMSNorm (model.layers.{0-1}.input_layernorm",
        "gated MLP: 2 x LlamaMLP (model.layers.{0-1}.mlp): SwiGLU",
        "output layer and cross-entropy: 1 x Linear (lm_head)",
        "residual stream: 2 x LlamaDecoderLayer",
        "rotary embedding: the model's own",
    ):
        assert line in text


class TestOnGpu:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    def test_fifty_compiled_steps_stay_within_the_noise_of_bf16(self, name: str) -> None:
        torch._dynamo.reset()
        shape = {"device": "cuda", "rows": 8, "length": 32}
        exact = torch.tensor(losses_of_steps(name, 50, precision="fp32", fuse=False, compile=False, **shape))
        plain = torch.tensor(losses_of_steps(name, 50, precision="bf16", fuse=False, compile=False, **shape))
        found = torch.tensor(losses_of_steps(name, 50, precision="bf16", **shape))
        noise = float((plain - exact).abs().mean())
        assert float(exact[-1]) < 0.9 * float(exact[0])
        assert float((found - exact).abs().mean()) < 3 * noise
        assert float((found - exact).abs().max()) < 0.01

    @pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt2", "bert", "t5-gated", "qwen3-moe", "cohere"])
    def test_loss_and_gradients_are_those_of_the_original(self, name: str) -> None:
        assert name in ALL
        torch.set_float32_matmul_precision("highest")
        model = build(name).cuda()
        given = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in batch(name).items()}
        twin = fused(copy.deepcopy(model), "cuda", compile=False)
        loss, gradients, _ = loss_and_gradients(twin, given)
        expected_loss, expected, _ = loss_and_gradients(model, given)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
        assert largest_gap(gradients, expected) < 1e-4
        report = report_of(twin)
        assert report is not None
        left = [entry for entry in report.left if entry.operation != "attention"]
        assert name not in CAUSAL or not left, str(report)

    @pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8-pure"])
    def test_compiled_blocks_stay_within_the_precision(self, precision: str) -> None:
        torch._dynamo.reset()
        shape = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
        model = build("llama", **shape).cuda()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.2 if parameter.ndim > 1 else 1.0)
        given = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in batch("llama").items()}
        twin = copy.deepcopy(model)
        apply_compute(twin, make_mesh(Layout(precision=precision), "cuda"), EngineOptions())  # type: ignore[arg-type]
        loss, gradients, _ = loss_and_gradients(twin, given)
        expected_loss, expected, _ = loss_and_gradients(model, given)
        assert float(loss) == pytest.approx(float(expected_loss), rel=0.02)
        wide = {name: gradient.float() for name, gradient in gradients.items()}
        assert largest_gap(wide, expected) < 0.2
