"""Quantisation on a GPU gives the model that it gives on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piledriver import compress
from piledriver.compress.calibration import open_for_blocks
from piledriver.compress.distil import reconstruct
from piledriver.compress.quantise import Method
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import save_folder
from piledriver.models.quantised import QuantisedLinear
from tests.engine.gpu import ON_GPU

pytestmark = ON_GPU


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_codes_and_kernels_agree_with_the_reference(method: Method) -> None:
    shape = ModelConfig(vocab_size=61, dim=256, layers=2, heads=4, mlp_dim=512, max_positions=256)
    model = Transformer(shape).to("cuda", torch.bfloat16).requires_grad_(False)
    tokens = torch.randint(61, (8, 200), generator=torch.Generator().manual_seed(0))
    small = compress.quantise(model, "w4a16-g128", method=method, data=tokens)
    for rows in (1, 8):  # kernels of few rows, and dequantised products of many
        here = small(tokens[:rows].cuda()).float().cpu()
        there = small.cpu()(tokens[:rows]).float()
        small.cuda()
        torch.testing.assert_close(here, there, rtol=0.05, atol=0.05 * float(there.abs().max()))


def test_reconstruction_agrees_with_the_cpu() -> None:
    shape = ModelConfig(vocab_size=61, dim=256, layers=2, heads=4, mlp_dim=512, max_positions=256)
    dense = Transformer(shape).requires_grad_(False)
    tokens = torch.randint(61, (16, 128), generator=torch.Generator().manual_seed(0))
    sparse = compress.prune(dense, 0.5, data=tokens)
    # Blocks wait on the host, as in `recover`.
    here, there = (reconstruct(sparse, dense, tokens, epochs=4, device=device) for device in ("cuda", "cpu"))
    for name, error in there.compression[-1]["relative_error"].items():
        other = here.compression[-1]["relative_error"][name]
        assert error["after"] < 0.9 * error["before"]
        assert other["after"] == pytest.approx(error["after"], rel=0.05)
    assert all(torch.equal(a == 0, b == 0) for a, b in zip(sparse.parameters(), here.parameters(), strict=True))


def test_blocks_on_the_host_give_the_same_codes(tmp_path: Path) -> None:
    shape = ModelConfig(vocab_size=61, dim=256, layers=2, heads=4, mlp_dim=512, max_positions=256)
    whole = Transformer(shape).to(torch.bfloat16).requires_grad_(False)
    save_folder(whole, tmp_path / "model")
    tokens = torch.randint(61, (8, 200), generator=torch.Generator().manual_seed(0))
    host, device = open_for_blocks(str(tmp_path / "model"), None)
    assert device.type == "cuda"
    assert next(host.blocks.parameters()).device.type == "cpu"
    apart = compress.quantise(host, "w4a16-g128", method="gptq", data=tokens, device=device)
    together = compress.quantise(whole.cuda(), "w4a16-g128", method="gptq", data=tokens)
    for name, layer in together.blocks.named_modules():
        if isinstance(layer, QuantisedLinear):
            other = apart.blocks.get_submodule(name)
            assert other.weight.device.type == "cpu"
            assert torch.equal(layer.weight.cpu(), other.weight)
