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
_JOBS: dict[Any, Future[None]] = {}
"""What has been started in this process, by kernel and variant."""
_ONE_DRY_RUN = threading.Lock()


class CompiledAhead:
    """Kernels of a computation that threads compile."""

    def __init__(self, jobs: list[Future[None]]) -> None:
        self._jobs = jobs

    def wait(self) -> None:
        """Return when they are compiled. A kernel that failed is compiled again when it is launched."""
        for job in self._jobs:
            error = job.exception()
            if error is not None:
                _log.warning("a kernel was not compiled ahead: %s: %s", type(error).__name__, error)


@functools.cache
def start_compiler() -> list[Future[None]]:
    """Start what the first compilation of a process does: build the driver's module, hash the compiler's files."""
    return [_threads().submit(_build_driver), _threads().submit(_hash_compiler)] if HAS_TRITON else []


def compile_ahead(run: Callable[[], object]) -> CompiledAhead:
    """Start compiling the Triton kernels that `run` calls and that are not compiled yet.

    `run` is called once, and launches no kernel of Triton: what they compute is not there. Its other operations take
    place, and must not depend on it.
    """
    missing: dict[Any, None] = {}
    try:
        start_compiler()[0].result()
        with _dry_run(missing):
            run()
    except Exception as error:  # another version of Triton, no memory: kernels are compiled when they are launched
        _log.warning("kernels are not compiled ahead: %s: %s", type(error).__name__, error)
    for kernel in missing:
        if kernel not in _JOBS:
            _JOBS[kernel] = _threads().submit(_compile, *kernel)
    return CompiledAhead([_JOBS[kernel] for kernel in missing])


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_WORKERS, thread_name_prefix="piledriver-compile")


@contextmanager
def _dry_run(missing: dict[Any, None]) -> Iterator[None]:
    """Within it, kernels that this thread calls are not launched; those that are not compiled are collected."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    with _ONE_DRY_RUN:
        caller, launch, hook = threading.get_ident(), JITFunction.run, knobs.runtime.jit_cache_hook

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            warmup = warmup or threading.get_ident() == caller
            return launch(self, *args, grid=grid, warmup=warmup, **options)

        def collect(**call: Any) -> Any:
            if threading.get_ident() != caller:
                return None if hook is None else hook(**call)
            missing[call["fn"].jit_function, call["compile"]["specialization_data"]] = None
            return True  # not compiled here

        JITFunction.run, knobs.runtime.jit_cache_hook = run, collect
        try:
            yield
        finally:
            JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook


def _compile(function: Any, specialization: str) -> None:
    from triton.runtime import driver

    start_compiler()[1].exception()  # once for all threads; a failure is that of the next line
    kernel = function.preload(specialization)
    # The first launch makes a launcher; the C compiler's result is then found in Triton's cache.
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def _build_driver() -> None:
    from triton.runtime import driver

    _ = driver.active


def _hash_compiler() -> None:
    from triton.runtime.cache import triton_key

    triton_key()  # kept by Triton
