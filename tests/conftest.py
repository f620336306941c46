"""What every test shares."""

from __future__ import annotations

import gc
import os

# Before torch is imported: many small processes on few cores must not fight for threads. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# Several workers share the machine; property tests keep their findings reproducible instead of timing out.
from hypothesis import HealthCheck, settings

settings.register_profile(
    "piledriver", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("piledriver")

# JAX is here to be compared with: its programs run once, so they are compiled quickly rather than well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: a broken rule shows in seconds, not after the crashes and the processes."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    # Every collection would look through all that was imported so far: millions of objects that never go.
    gc.collect()
    gc.freeze()
