"""Measure this machine's rates in under a minute: matrix products, attention, copies, collectives, the host, disk."""

from __future__ import annotations

import datetime
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from piledriver.plan.hardware.calibration_file import save_calibration
from piledriver.plan.hardware.host_rates import launch_seconds, offloaded_step_rate, wait

# Rows, columns, depth: square products, and those of blocks (wide, narrow, deep) at two sizes.
_SHAPES = (
    (8192, 8192, 8192),
    (16384, 4096, 4096),
    (16384, 3072, 2048),
    (16384, 16384, 2048),
    (16384, 2048, 8192),
    (32768, 2304, 768),
    (32768, 4096, 768),
    (32768, 768, 2048),
    (2048, 8192, 16384),
    (768, 2304, 32768),
    (4096, 50304, 768),
    (4096, 128256, 2048),
    (4096, 1024, 1024),
    (2048, 2048, 2048),
    (1024, 4096, 1024),
)
_CPU_SHAPES = ((512, 512, 512), (2048, 256, 128), (2048, 704, 256), (256, 128, 2048), (256, 4096, 128))


def calibrate(*, seconds: float = 50.0, save: bool = True) -> tuple[Path | None, dict[str, Any]]:
    """Measure the rates of this machine's first device; return the file that keeps them, and the rates."""
    begun = time.monotonic()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"

    # A shared host is faster and slower by the second: the median of moments far from each other.
    clocks = [launch_seconds(device)]
    rates: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": name,
        "torch": torch.__version__,
        "matmul": matmul_rates(device, 0.4 * seconds),
        "attention": attention_rate(device),
        "memory": copy_rate(device),
    }
    clocks.append(launch_seconds(device))
    if device.type == "cuda":
        rates["host_link"] = host_link_rate(device)
        rates["offloaded_step"] = offloaded_step_rate(device)
    rates["disk_write"], rates["disk_read"] = disk_rates()
    rates["launch"] = statistics.median([*clocks, launch_seconds(device)])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        rates["collectives"] = collective_rates(device)
    rates["seconds"] = round(time.monotonic() - begun, 1)
    return (save_calibration(name, rates) if save else None), rates


def timed(run: Callable[[], Any], device: torch.device, *, at_least: float = 0.03, most: int = 50) -> float:
    """Return the median seconds of a call, after a warm-up."""
    run()
    wait(device)
    taken: list[float] = []
    end = time.perf_counter() + at_least
    while len(taken) < 3 or (time.perf_counter() < end and len(taken) < most):
        begun = time.perf_counter()
        run()
        wait(device)
        taken.append(time.perf_counter() - begun)
    return sorted(taken)[len(taken) // 2]


def matmul_rates(device: torch.device, seconds: float) -> dict[str, list[list[float]]]:
    """Return [rows, columns, depth, operations per second] of products by dtype."""
    found: dict[str, list[list[float]]] = {}
    gpu = device.type == "cuda"
    dtypes = {"bf16": torch.bfloat16} if gpu else {"fp32": torch.float32}
    shapes = _SHAPES if gpu else _CPU_SHAPES
    end = time.monotonic() + seconds
    for label, dtype in dtypes.items():
        found[label] = []
        for m, n, k in shapes:
            if time.monotonic() > end:
                break
            left, right = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
            # Several at once: a launch must not count.
            repeats = 8 if gpu else 1

            def run(left: torch.Tensor = left, right: torch.Tensor = right, repeats: int = repeats) -> None:
                for _ in range(repeats):
                    F.linear(left, right)

            taken = timed(run, device, at_least=0.05) / repeats
            found[label].append([m, n, k, 2.0 * m * n * k / taken])
    if gpu and torch.cuda.get_device_capability() >= (8, 9):
        found["fp8"] = _fp8_rates(device, torch.bfloat16)
        found["fp8-fp32"] = _fp8_rates(device, torch.float32)
    return found


def _fp8_rates(device: torch.device, out: torch.dtype) -> list[list[float]]:
    """Return the rates of fp8 products that write `out`: gradients of fp32 weights are written in fp32."""
    found = []
    one = torch.ones((), device=device)
    for m, n, k in _SHAPES[:5]:
        left = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        right = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()

        def run(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            for _ in range(8):
                torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=out)

        found.append([m, n, k, 2.0 * m * n * k / (timed(run, device) / 8)])
    return found


def attention_rate(device: torch.device) -> float:
    """Return operations per second of causal attention, forward and backward, with heads of 128."""
    gpu = device.type == "cuda"
    batch, heads, length, width = (4, 16, 4096, 128) if gpu else (1, 2, 256, 128)
    dtype = torch.bfloat16 if gpu else torch.float32
    q, k, v = (
        torch.randn(batch, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn_like(q)

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    flops = 3.5 * 4 * batch * heads * length * (length / 2) * width
    # As `Rates` counts: the edges of the mask are taken off.
    context = length / 2
    return flops / timed(run, device, at_least=0.2) / (context / (context + 96))


def copy_rate(device: torch.device) -> float:
    """Return bytes per second that elementwise kernels read and write."""
    elements = 1 << (28 if device.type == "cuda" else 22)
    source = torch.randn(elements, device=device, dtype=torch.bfloat16)
    other = torch.randn_like(source)
    target = torch.empty_like(source)
    seconds = timed(lambda: torch.add(source, other, out=target), device, at_least=0.1)
    return 3 * source.nbytes / seconds


def host_link_rate(device: torch.device) -> float:
    """Return bytes per second from pinned host memory to the device."""
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    return host.nbytes / timed(lambda: target.copy_(host, non_blocking=True), device, at_least=0.1)


def disk_rates(size: int = 1 << 27) -> tuple[float, float]:
    """Return bytes per second written (to the disk, not to its cache) and read, in the folder of temporary files."""
    data = os.urandom(1 << 22) * (size >> 22)
    with tempfile.NamedTemporaryFile(delete=True) as file:
        begun = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = size / (time.perf_counter() - begun)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.perf_counter()
        while file.read(1 << 22):
            pass
        return written, size / (time.perf_counter() - begun)


def collective_rates(device: torch.device) -> dict[str, list[list[float]]]:
    """Return [bytes, seconds] of all-reduce and all-gather over all connected ranks, which call this together."""
    found: dict[str, list[list[float]]] = {"all-reduce": [], "all-gather": []}
    ranks = dist.get_world_size()
    for power in (16, 20, 24, 27) if device.type == "cuda" else (12, 18, 22):
        tensor = torch.ones(1 << (power - 2), device=device)
        out = torch.empty(ranks * tensor.numel(), device=device)
        reduce = functools.partial(dist.all_reduce, tensor)
        gather = functools.partial(dist.all_gather_into_tensor, out, tensor)
        found["all-reduce"].append([tensor.nbytes, timed(reduce, device, most=5)])
        found["all-gather"].append([out.nbytes, timed(gather, device, most=5)])
    return found
