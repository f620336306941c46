"""Fused models under layouts of several processes: losses and gradients of plain torch; what was left is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from piledriver.accelerator import Accelerator
from piledriver.engine import Layout
from piledriver.engine.fused.lazy_logits import LazyLogits
from piledriver.engine.fused.report import report_of
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run
from tests.engine.test_foreign_models import EAGER, assert_like_plain, batch_of, made

pytest.importorskip("transformers")


def _on_two(rank: int) -> None:
    # The parity matrix (tests/laws) has the decoders.
    assert_like_plain("bart", Layout(zero=3, fuse=True, **EAGER))
    _own_loss(Layout(zero=3, fuse=True, **EAGER))
    operations = {}
    for layout in (
        Layout(zero=3, **EAGER, fuse=True),
        Layout(cp=2, **EAGER, fuse=True),
        Layout(pp=2, **EAGER, fuse=True),
        Layout(tp=2, **EAGER, fuse=True),
    ):
        report = report_of(Accelerator(world=group_world(), layout=layout).prepare(made("llama")))
        assert report is not None
        operations[layout.zero, layout.cp, layout.pp, layout.tp] = {entry.operation for entry in report.replaced}
    layers = {"norm", "gated MLP"}
    assert operations[3, 1, 1, 1] == operations[0, 2, 1, 1] == layers | {"output layer and cross-entropy"}
    assert operations[0, 1, 2, 1] == layers
    # Sharded layers of MLPs and output compute on their own.
    assert operations[0, 1, 1, 2] == {"norm"}


def _own_loss(layout: Layout) -> None:
    """A loss that the user computes of the logits after the model has returned."""
    norms = []
    for model in (Accelerator(world=group_world(), layout=layout).prepare(made("llama")), made("llama")):
        tokens = batch_of(2)["input_ids"]
        logits: Any = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        if not norms:
            assert isinstance(logits, LazyLogits)
            assert not logits.product.read
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        full = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
        norms.append((loss.detach(), torch.stack([g.norm() for g in full]).norm()))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_fused_models_train_as_in_plain_torch() -> None:
    run(2, _on_two)
