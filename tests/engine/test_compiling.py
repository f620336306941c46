"""Blocks are compiled in place, once for all of one kind; what the compiler could not do is counted."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piledriver.engine.activations import apply_activation_checkpointing
from piledriver.engine.activations import offload as activations_offload
from piledriver.engine.compile import apply_compile, compile_report, is_compiled
from piledriver.engine.data_parallel import apply_zero
from piledriver.engine.errors import LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.tensor_parallel import apply_tp
from piledriver.models import ModelConfig, Transformer
from tests.checkpoint.processes import run as on_ranks

# dynamo looks at the gradients of everything it guards, and expects that warnings are not errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

TOKENS = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()


def small() -> Transformer:
    return Transformer(ModelConfig(vocab_size=64, dim=32, layers=2, heads=2))


def gradients(model: nn.Module) -> list[Tensor]:
    for _ in range(2):
        model.zero_grad()
        sums = model(TOKENS[:, :-1], targets=TOKENS[:, 1:])
        (sums.total / sums.tokens).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


POLICIES: list[dict[str, Any]] = [
    {},
    {"activations": "selective"},
    {"activations": "full", "activation_offload": True},
    {"recompute_norms": True},
    {"recompute_norms": True, "compile": "model"},
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_equal_blocks_share_one_graph_whatever_they_save(
    policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations_offload, "SMALLEST_BYTES", 1)
    layout = Layout(**{"compile": True, **policy})
    model = small()
    names = list(model.state_dict())
    expected = gradients(copy.deepcopy(model))
    apply_activation_checkpointing(model, make_mesh(layout, "cpu"))
    apply_compile(model, make_mesh(layout, "cpu"), {"backend": "aot_eager"})
    for ours, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-5)
    assert list(model.state_dict()) == names
    report = compile_report()
    assert (report.graphs, report.breaks, report.recompiles) == (1, {}, {})


def saved_bytes(layout: Layout) -> int:
    model = small()
    apply_compile(model, make_mesh(layout, "cpu"), {"backend": "aot_eager"})
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(TOKENS[:, :-1], targets=TOKENS[:, 1:])
    torch._dynamo.reset()
    return sum(seen.values())


def test_the_compiler_keeps_to_the_budget() -> None:
    everything = saved_bytes(Layout(compile=True))
    assert saved_bytes(Layout(compile=True, activations="budget", activation_budget=0.4)) < 0.6 * everything
    assert torch._functorch.config.activation_memory_budget == 1.0


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Talks()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Talks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break("on purpose")
        return x + 1


def test_breaks_and_recompiles_are_counted_with_their_reasons() -> None:
    model = apply_compile(Breaks(), make_mesh(Layout(compile=True), "cpu"), {"backend": "eager"})
    model(torch.ones(2, 4, requires_grad=True))
    report = compile_report()
    assert sum(report.breaks.values()) >= 1
    assert "breaks (" in str(report)
    assert any(re.search(r" in forward \(test_compiling\.py:\d+\)$", reason) for reason in report.breaks), report
    assert not report.recompiles
    model.double()(torch.ones(2, 4, dtype=torch.float64))
    again = compile_report().recompiles
    assert sum(again.values()) >= 1
    assert all(re.match(r"\w+ \([\w.]+:\d+\): \w", reason) for reason in again), again


class Counts(nn.Module):
    """A block that counts itself in a cache, as Hugging Face's do."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.inner = layer, nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        x = self.inner(x)
        return x if cache is None else cache.update(x, self.layer)


class Cache:
    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.layers)

    def update(self, x: Tensor, layer: int) -> Tensor:
        assert layer == len(self.layers)
        self.layers.append(x)
        return x


def test_a_cache_costs_no_compilation_for_each_layer() -> None:
    model = nn.ModuleList(Counts(layer) for layer in range(3))
    apply_compile(model, make_mesh(Layout(compile=True), "cpu"), {"backend": "eager"})
    x, cache = torch.ones(2, 4, requires_grad=True), Cache()
    for layer in model:
        x = layer(x, cache)
    assert not compile_report().recompiles
    # Generation fills it, uncompiled.
    with torch.no_grad():
        for layer in model:
            x = layer(x, cache)
    assert len(cache.layers) == 3
    assert compile_report().graphs == 1


def test_hints_of_the_compiler_are_no_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        apply_compile(small(), make_mesh(Layout(compile=True), "cpu"))
        # The text of torch 2.11: it ended the compilation of a router's softmax where warnings are errors.
        warnings.warn("\nOnline softmax is disabled on the fly since Inductor decides to\nsplit", stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)


def test_when_and_what() -> None:
    model = small()
    assert not is_compiled(make_mesh(Layout(), "cpu"))
    assert is_compiled(make_mesh(Layout(compile=True), "cpu"))
    apply_compile(model, make_mesh(Layout(), "cpu"))
    assert "forward" not in model.blocks["0"].__dict__
    with pytest.raises(LayoutError, match="compile 'model' with tp 2"):
        Layout(compile="model", tp=2)
    # Nothing repeats: the model itself. A copy computes with its own weights.
    single = apply_compile(nn.Linear(2, 2), make_mesh(Layout(compile=True), "cpu"), {"backend": "eager"})
    other = copy.deepcopy(single)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert other(torch.ones(1, 2)).abs().sum() == 0
    assert single(torch.ones(1, 2)).abs().sum() != 0


LAYOUTS = [
    Layout(zero=3, compile=True, activations="full", activation_offload=True),
    Layout(tp=2, compile=True, activations="selective"),
]


def process(rank: int) -> None:
    warnings.simplefilter("ignore")
    activations_offload.SMALLEST_BYTES = 1
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    expected = small()(inputs, targets=targets).total.item()
    for layout in LAYOUTS:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        mesh = make_mesh(layout, "cpu")
        model = apply_tp(small(), mesh)
        apply_activation_checkpointing(model, mesh)
        apply_compile(model, mesh, {"backend": "aot_eager"})
        apply_zero(model, mesh)
        for _ in range(2):
            loss = model(inputs, targets=targets).total
            loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        report = compile_report()
        assert (report.graphs, report.breaks) == (1, {}), f"{layout}: {report}"


@pytest.mark.slow
def test_blocks_that_are_shared_out_share_one_graph_too() -> None:
    on_ranks(2, process)


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, width + 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.widen(x).relu()
        return out


def test_blocks_of_many_shapes_stay_compiled() -> None:
    """Stages of a network that grows are one function: torch's limit of graphs for it would leave some uncompiled."""
    model = nn.Sequential(*(Stage(width) for width in range(4, 14)))
    with torch._dynamo.config.patch(recompile_limit=8):
        apply_compile(model, make_mesh(Layout(compile=True), "cpu"), {"backend": "eager"})
        before = compile_report().graphs
        for rows in (2, 2, 3):
            model(torch.randn(rows, 4)).sum().backward()
        assert compile_report().graphs - before == 20
