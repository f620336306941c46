# mypy: disable-error-code="import-not-found,import-untyped"
"""Compile ahead: find the kernels of a computation by a dry run, and compile them at once in threads.

Triton compiles a kernel when it is first launched, so that a first step waits for one compiler run after another. Most
of that time is spent outside the interpreter (passes, ptxas, the C compiler of the launchers) and can overlap.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from piledriver.kernels.registry import HAS_TRITON

_log = logging.getLogger("piledriver.kernels")
_WORKERS = 8


class CompiledAhead:
    """Kernels that threads compile."""

    def __init__(self, jobs: list[Callable[[], None]]) -> None:
        self._pending = _submit(jobs)

    def wait(self) -> None:
        """Return when the threads are done. A kernel that failed is compiled again when it is launched."""
        for future in self._pending:
            error = future.exception()
            if error is not None:
                _log.warning("a kernel was not compiled ahead: %s: %s", type(error).__name__, error)
        self._pending.clear()


@functools.cache
def start_compiler() -> list[Future[None]]:
    """Start what the first compilation of a process does: build the driver's module, hash the compiler's files."""
    return _submit([_build_driver, _hash_compiler]) if HAS_TRITON else []


def compile_ahead(run: Callable[[], object]) -> CompiledAhead:
    """Start compiling the Triton kernels that `run` launches and that are not compiled yet.

    `run` is called once: its other operations take place, kernels that are compiled already are launched, and those
    that are not are left out, so that its results mean nothing.
    """
    found: dict[Any, Callable[[], None]] = {}
    try:
        start_compiler()[0].result()
        with _missing_kernels(found):
            run()
    except Exception as error:  # another version of Triton, no memory: kernels are compiled when they are launched
        _log.warning("kernels are not compiled ahead: %s: %s", type(error).__name__, error)
    return CompiledAhead(list(found.values()))


def _submit(jobs: list[Callable[[], None]]) -> list[Future[None]]:
    """Run jobs in threads that end with them."""
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="piledriver-compile")
    pending = [pool.submit(job) for job in jobs]
    pool.shutdown(wait=False)
    return pending


@contextmanager
def _missing_kernels(found: dict[Any, Callable[[], None]]) -> Iterator[None]:
    """Within it, kernels that this thread calls and that are not compiled are collected instead of compiled."""
    from triton import knobs

    before, caller = knobs.runtime.jit_cache_hook, threading.get_ident()

    def collect(**call: Any) -> Any:
        if threading.get_ident() != caller:
            return None if before is None else before(**call)
        function, specialization = call["fn"].jit_function, call["compile"]["specialization_data"]
        found[function, specialization] = functools.partial(_compile, function, specialization)
        return True  # neither compiled nor launched

    knobs.runtime.jit_cache_hook = collect
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _compile(function: Any, specialization: str) -> None:
    from triton.runtime import driver

    start_compiler()[1].result()
    kernel = function.preload(specialization)
    # The first launch makes a launcher; the C compiler's result is then found in Triton's cache.
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def _build_driver() -> None:
    from triton.runtime import driver

    _ = driver.active


def _hash_compiler() -> None:
    from triton.runtime.cache import triton_key

    triton_key()  # kept by Triton
