# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""Kernels in Gluon whose matrix instructions take any multiple of eight tokens.

Hopper's instruction (wgmma) takes up to 256 tokens in steps of 8, but Triton writes it for all tokens of a tensor: a
power of two. If a kernel needs only the first tokens of its tensors, its instructions are narrowed to them in PTX,
which is assembled again. It must not store the sums of further tokens; these take no registers.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    from triton.experimental.gluon._runtime import GluonJITFunction
except ImportError:
    GluonJITFunction = object

_INSTRUCTION = re.compile(r"(wgmma\.mma_async\.\S+\.m64n)(\d+)(k16\.f32\.bf16\.bf16 \{)([^}]*)\}")


def narrowed(ptx: str, tokens: int) -> str:
    """Return code whose matrix instructions take the first `tokens` at most.

    >>> narrowed("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, {%r9}", 8)
    'wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, {%r9}'
    """

    def narrow(found: re.Match[str]) -> str:
        count = min(int(found[2]), tokens)
        # Of every eight tokens a lane has two, for two outputs each.
        sums = ",".join(found[4].split(",")[: count // 2])
        return f"{found[1]}{count}{found[3]}{sums}}}"

    return _INSTRUCTION.sub(narrow, ptx)


class NarrowKernel(GluonJITFunction):
    """A kernel whose compiled name (`repr`) ends with the tokens that matrix instructions take at most."""

    def create_binder(self) -> Any:
        """Prepare compilation for a device; Triton calls this once for each."""
        binder = super().create_binder()
        self.compile: Callable[..., Any] = functools.partial(_compile, self.compile)
        return binder


def _compile(compile_kernel: Callable[..., Any], source: Any, *, target: Any, options: Any, **more: Any) -> Any:
    """Return the compiled kernel with narrowed instructions."""
    kernel = compile_kernel(source, target=target, options=options, **more)
    wide = kernel.asm.get("ptx", "")  # Triton may be told to keep machine code only
    ptx = narrowed(wide, int(re.findall(r"\d+$", kernel.name)[0]))
    if ptx != wide:
        kernel.asm["ptx"], kernel.asm["cubin"] = ptx, _assembled(ptx, source.language, target, options)
        kernel.kernel = kernel.asm["cubin"]  # what is loaded at the first launch
    return kernel


def _assembled(ptx: str, language: Any, target: Any, options: dict[str, Any]) -> bytes:
    """Return machine code, which Triton's cache keeps."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_manager

    backend = make_backend(target)
    cache = get_cache_manager(hashlib.sha256(f"{backend.hash()} {ptx}".encode()).hexdigest())
    found = cache.get_file("narrowed.cubin")
    if found is not None:
        return Path(found).read_bytes()
    stages: dict[str, Callable[..., bytes]] = {}
    backend.add_stages(stages, backend.parse_options(dict(options)), language)
    machine_code = stages["cubin"](ptx, {})
    cache.put(machine_code, "narrowed.cubin", binary=True)
    return machine_code
