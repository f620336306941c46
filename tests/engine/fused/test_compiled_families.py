"""Compiled blocks of the most used architectures: one graph for each kind of block, none in the second step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from piledriver.engine.apply import apply_compute
from piledriver.engine.compile import compile_report, reset_compiler
from piledriver.engine.fp8 import apply as fp8
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.options import EngineOptions

pytest.importorskip("transformers")

from tests.engine.fused.catalogue import batch, build, graphs_of

# dynamo looks at the gradients of everything it guards, and expects that warnings are not errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

KINDS = {"llama": 1, "gemma3": 1, "gpt2": 1, "mixtral": 1, "bert": 1, "vit": 1, "t5": 4}
"""Kinds of blocks: an encoder's and a decoder's; T5's first blocks compute the bias that the others take.

`graphs_of` of the catalogue prints the same for every architecture that it knows.
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_compiler()
    yield
    reset_compiler()


@pytest.mark.parametrize("name", list(KINDS))
def test_one_graph_for_each_kind_of_block_and_none_for_further_lengths(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "WORTH", 0.0)
    first, second, third, fourth = graphs_of(name, (16, 16, 24, 20), precision="fp8")
    assert first == second == KINDS[name]
    # The second length makes lengths symbolic, once.
    assert third == fourth <= 2 * KINDS[name]
    assert not compile_report().breaks


def test_gradients_of_fp8_blocks_of_other_libraries_are_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "WORTH", 0.0)
    losses = {}
    for precision in ("fp32", "fp8"):
        model = build("llama")
        mesh = make_mesh(Layout(fuse=True, precision=precision), "cpu")  # type: ignore[arg-type]
        apply_compute(model, mesh, EngineOptions())
        layers = fp8.fp8_layers(model)
        assert ("model.layers.0.mlp" in layers) == (precision == "fp8")
        assert "lm_head" not in layers
        losses[precision] = float(model(**batch("llama")).loss.detach())
    assert losses["fp8"] == pytest.approx(losses["fp32"], rel=0.05)
    assert torch.isfinite(torch.tensor(losses["fp8"]))
