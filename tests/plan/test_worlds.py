"""Elastic batches divide exactly at every world size; inference plans fit, and say what would."""

from __future__ import annotations

import pytest

from piledriver.plan import PlanError
from piledriver.plan.inference import plan_inference
from piledriver.plan.worlds import elastic_batch


def test_every_world_gives_the_batch_exactly() -> None:
    found = elastic_batch(10_000, [8, 12, 16, 17], smallest=32, largest=1500)
    assert all(world * micro * calls == found.batch for world, (micro, calls) in found.worlds.items())
    assert all(32 <= world <= 1500 for world in found.worlds)
    # The example of DeepSpeed's elasticity tests: 9,792 has the most valid world sizes.
    assert (found.batch, len(found.worlds)) == (9792, 23)


def test_impossible_ranges_are_refused() -> None:
    with pytest.raises(PlanError, match="batch of 4"):
        elastic_batch(2, [4])
    with pytest.raises(PlanError):
        elastic_batch(16, [4], smallest=5, largest=7)


def test_inference_fits_with_its_cache_and_says_how_many_requests_would() -> None:
    made = plan_inference("llama-3-8b", batch=16, length=8192, hardware="1xh100-80g")
    assert made.fits
    assert plan_inference("llama-3-8b", batch=made.longest_batch, length=8192, hardware="1xh100-80g").fits
    with pytest.raises(PlanError, match=r"GiB too large"):
        plan_inference("llama-3-8b", batch=made.longest_batch + 1, length=8192, hardware="1xh100-80g")
    assert plan_inference("llama-3-70b", batch=1, length=4096, hardware="8xh100-80g").tp >= 2


def test_a_batch_that_is_far_too_large_names_the_one_that_fits() -> None:
    few = plan_inference("gpt2", batch=1, length=1024, hardware="1xh100-80g").longest_batch
    assert few > 1000
    with pytest.raises(PlanError, match=f"use {few} requests"):
        plan_inference("gpt2", batch=10**8, length=1024, hardware="1xh100-80g")
    with pytest.raises(PlanError, match="the weights leave no room"):
        plan_inference("mixtral-8x7b", batch=1, length=128, hardware="1xl4")


def test_many_short_requests_wait_for_compute() -> None:
    one, many = (plan_inference("llama-3-8b", batch=n, length=128, hardware="1xh100-80g") for n in (1, 1024))
    assert many.decode_seconds > 2 * one.decode_seconds
