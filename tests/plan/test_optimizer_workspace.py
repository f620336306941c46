"""Temporaries of an optimizer step, counted on fake tensors of a GPU, against what the planner says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.optim import Muon
from piledriver.plan.blocks.parameters import parts_of
from piledriver.plan.memory.optimizer_workspace import newton_schulz_bytes


class LiveBytes(TorchDispatchMode):
    """The largest bytes of storages that were made inside and are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(found):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage._cdata not in self.known:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {key: one for key, one in self.made.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return found


@pytest.mark.parametrize(("dim", "mlp_dim", "layers"), [(256, 768, 20), (128, 256, 9), (512, 512, 3)])
def test_muon_holds_one_batch_of_matrices(dim: int, mlp_dim: int, layers: int) -> None:
    config = ModelConfig(vocab_size=512, dim=dim, layers=layers, heads=4, mlp_dim=mlp_dim, max_positions=16)
    shapes = [one.shape for one in parts_of(config).block if len(one.shape) > 1]
    with FakeTensorMode():
        weights = [nn.Parameter(torch.empty(shape, device="cuda")) for _ in range(layers) for shape in shapes]
        optimizer = Muon(weights)
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer.step()
        live = LiveBytes()
        live.known = {t.untyped_storage()._cdata for s in optimizer.state.values() for t in s.values()}
        live.known |= {one.untyped_storage()._cdata for w in weights for one in (w, w.grad) if one is not None}
        with live:
            optimizer.step()
    assert newton_schulz_bytes(config, Layout(), layers) == pytest.approx(live.peak, rel=0.02)
