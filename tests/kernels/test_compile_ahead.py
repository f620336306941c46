"""Kernels of a dry run are compiled once each, in threads; failures leave them to their first launch."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from piledriver.kernels import compile_ahead as room
from piledriver.kernels.compile_ahead import compile_ahead


class Jit:
    """A kernel with Triton's protocol: the hook is asked before a variant is compiled, and may refuse."""

    def __init__(self, triton: Any, *, broken: bool = False) -> None:
        self.triton, self.broken = triton, broken
        self.compiled: list[tuple[str, int]] = []
        self.launched = 0

    def __call__(self, variant: str) -> None:
        self.run(variant, grid=(1,), warmup=False)

    def run(self, variant: str, *, grid: tuple[int], warmup: bool) -> None:
        if variant not in [name for name, _ in self.compiled]:
            hook = self.triton.knobs.runtime.jit_cache_hook
            call = {"fn": SimpleNamespace(jit_function=self), "compile": {"specialization_data": variant}}
            if hook is not None and hook(**call):
                return
            self.preload(variant)
        self.launched += not warmup

    def preload(self, variant: str) -> Any:
        if self.broken:
            raise RuntimeError("ptxas failed")
        self.compiled.append((variant, threading.get_ident()))
        return SimpleNamespace(src=variant, metadata=None)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = ("triton", "triton.runtime", "triton.runtime.cache", "triton.runtime.jit")
    fakes: dict[str, Any] = {name: ModuleType(name) for name in names}
    fake = fakes["triton"]
    launchers: list[str] = []
    fake.launchers = launchers
    fake.knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None))
    active = SimpleNamespace(launcher_cls=lambda src, metadata: launchers.append(src))
    fakes["triton.runtime"].driver = SimpleNamespace(active=active)
    fakes["triton.runtime.jit"].JITFunction = Jit
    fakes["triton.runtime.cache"].triton_key = lambda: "key"
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(room, "HAS_TRITON", True)
    monkeypatch.setattr(room, "_JOBS", {})
    room.start_compiler.cache_clear()
    yield fake
    room.start_compiler.cache_clear()


def test_missing_kernels_are_compiled_in_threads_and_none_is_launched(triton: Any) -> None:
    one, other = Jit(triton), Jit(triton)
    one("ready")

    def run() -> None:
        for _ in range(3):
            one("ready")
            one("fp32")
            one("bf16")
            other("fp32")

    for ahead in (compile_ahead(run), compile_ahead(run)):  # what is on its way is not started again
        ahead.wait()
    assert triton.knobs.runtime.jit_cache_hook is None
    assert sorted(name for name, _ in one.compiled) == ["bf16", "fp32", "ready"]
    assert [name for name, _ in other.compiled] == ["fp32"]
    assert sorted(triton.launchers) == ["bf16", "fp32", "fp32"]
    here = threading.get_ident()
    assert [name for name, thread in (*one.compiled, *other.compiled) if thread == here] == ["ready"]
    assert (one.launched, other.launched) == (1, 0)
    other("fp32")
    assert other.launched == 1


def test_other_threads_compile_and_launch_as_usual(triton: Any) -> None:
    kernel = Jit(triton)

    def run() -> None:
        thread = threading.Thread(target=kernel, args=("fp32",))
        thread.start()
        thread.join()

    compile_ahead(run).wait()
    assert kernel.launched == 1


def test_a_kernel_that_fails_is_left_to_its_launch(triton: Any, caplog: pytest.LogCaptureFixture) -> None:
    kernel, broken = Jit(triton), Jit(triton, broken=True)

    def run() -> None:
        broken("fp32")
        kernel("fp32")

    with caplog.at_level(logging.WARNING):
        compile_ahead(run).wait()
    assert "ptxas failed" in caplog.text
    assert [name for name, _ in kernel.compiled] == ["fp32"]
    with pytest.raises(RuntimeError, match="ptxas"):
        broken("fp32")


def test_a_dry_run_that_fails_stops_nothing(triton: Any, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise MemoryError("no room")

    with caplog.at_level(logging.WARNING):
        compile_ahead(run).wait()
    assert "no room" in caplog.text
    assert triton.knobs.runtime.jit_cache_hook is None
