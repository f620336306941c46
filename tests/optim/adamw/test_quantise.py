"""Laws of rounding and quantisation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piledriver.kernels.rounding import noise_bits, round_to_bf16
from piledriver.optim.adamw.quantise import dequantise_signed, dequantise_unsigned, quantise_signed, quantise_unsigned


@given(seed=st.integers(0, 1000), exponent=st.integers(-30, 30))
def test_rounding_gives_a_neighbour_and_keeps_what_is_exact(seed: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 64, generator=generator) * 2.0**exponent
    rounded = round_to_bf16(x, noise_bits(8, 64, 0, seed, x.device)).float()
    assert ((rounded - x).abs() <= x.abs() * 2.0**-7).all()
    exact = x.bfloat16().float()
    assert torch.equal(round_to_bf16(exact, noise_bits(8, 64, 0, seed, x.device)).float(), exact)


def test_rounding_is_unbiased() -> None:
    x = torch.full((1000, 100), 1.0 + 3e-4)
    rounded = round_to_bf16(x, noise_bits(1000, 100, 0, 1, x.device)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    assert rounded.mean().item() == pytest.approx(1.0 + 3e-4, abs=3e-5)


def test_noise_depends_on_the_index_only() -> None:
    whole = noise_bits(8, 16, 0, 9, torch.device("cpu"))
    part = noise_bits(4, 16, 64, 9, torch.device("cpu"))
    assert torch.equal(whole[4:], part)
    assert not torch.equal(whole, noise_bits(8, 16, 0, 10, torch.device("cpu")))
    uniform = noise_bits(1000, 100, 0, 3, torch.device("cpu")).double() * 2.0**-32
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.005)
    assert uniform.std().item() == pytest.approx(12**-0.5, abs=0.005)


@given(seed=st.integers(0, 1000), spread=st.floats(0.0, 3.0))
def test_quantisation_keeps_relative_precision(seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 64, generator=generator) * 10 ** (-spread * torch.rand(4, 64, generator=generator))
    noise = torch.rand(4, 64, generator=generator)
    back = dequantise_signed(*quantise_signed(x, noise))
    largest = x.abs().amax(dim=1, keepdim=True)
    assert ((back - x).abs() <= 0.08 * x.abs() + 1.01e-4 * largest).all()
    assert torch.equal(back.sign().abs() * x.sign(), back.sign())
    squares = x * x
    back = dequantise_unsigned(*quantise_unsigned(squares, noise))
    assert ((back - squares).abs() <= 0.08 * squares + 1.01e-8 * largest**2).all()
    assert ((back > 0) == (squares > 0)).all()


def test_quantisation_is_unbiased() -> None:
    x = torch.tensor([1.0, 0.123, -0.0456, 1e-5] * 16).repeat(20000, 1)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    back = dequantise_signed(*quantise_signed(x, noise)).mean(dim=0)
    torch.testing.assert_close(back, x[0], rtol=2e-3, atol=1e-6)


def test_zeros_stay_zeros() -> None:
    zero, noise = torch.zeros(2, 64), torch.rand(2, 64)
    assert torch.equal(dequantise_signed(*quantise_signed(zero, noise)), zero)
    assert torch.equal(dequantise_unsigned(*quantise_unsigned(zero, noise)), zero)
