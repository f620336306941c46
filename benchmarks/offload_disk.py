"""Train with master weights and optimizer states on disk, or split over host memory and disk.

    python benchmarks/offload_disk.py --folder /nvme --model 4b --gradients host
    python benchmarks/offload_disk.py --folder /nvme --model 13b --share 0.28 --gradients step
    python benchmarks/offload_disk.py --model tiny --device cpu        # on any machine

Random tokens through `Accelerator`, torch's AdamW, bf16 on a GPU. One JSON line of all steps so far after each: host
bytes per parameter (the peak of this process's private memory over that before the model was offloaded) and of that
the stated buffers; seconds of each step; the share of the optimizer step's time in which a disk transfer was in
flight, and its rate beside the raw O_DIRECT rate of the folder, measured in the same run. The process ends itself
before host memory runs out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver import Accelerator
from piledriver.engine import Layout, Offload
from piledriver.engine.offload import offloaded
from piledriver.engine.offload.disk.rate import measure_rate
from piledriver.models import ModelConfig, Transformer

SHAPES = {
    "tiny": {"vocab_size": 1024, "dim": 256, "layers": 4, "heads": 4},
    "small": {"vocab_size": 32000, "dim": 1024, "layers": 12, "heads": 8},
    "4b": {"vocab_size": 32000, "dim": 3072, "layers": 35, "heads": 24, "mlp_dim": 8192},
    "13b": {"vocab_size": 32000, "dim": 5120, "layers": 41, "heads": 40, "mlp_dim": 13824},
}
GIB = 2**30


def private_bytes() -> int:
    """Bytes of anonymous memory of this process (what files are mapped into is not counted)."""
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0])


class MemoryGuard(threading.Thread):
    """Records the peak of private memory, and ends the process before the machine has none left."""

    def __init__(self, spare: int) -> None:
        super().__init__(daemon=True)
        self.peak, self.spare = 0, spare
        self.start()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, private_bytes())
            free = 1024 * int(re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[0])
            if free < self.spare:
                print(f"only {free / GIB:.1f} GiB of host memory are left: stopped", file=sys.stderr, flush=True)
                os._exit(3)
            time.sleep(0.05)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", choices=SHAPES, default="tiny")
    arguments.add_argument("--folder", default="/tmp")
    arguments.add_argument("--share", type=float, default=1.0, help="share of masters and states on disk")
    arguments.add_argument("--gradients", choices=("host", "disk", "step"), default="host")
    arguments.add_argument("--parameters", choices=("device", "host", "disk"), default="device")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--steps", type=int, default=2)
    arguments.add_argument("--seconds", type=float, default=1e9, help="begin no step that would end after this")
    arguments.add_argument("--batch", type=int, default=1)
    arguments.add_argument("--length", type=int, default=512)
    arguments.add_argument("--buffers", type=int, default=4)
    chosen = arguments.parse_args()
    begun = time.perf_counter()

    def note(text: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {text}", file=sys.stderr, flush=True)

    rate = measure_rate(chosen.folder, 2 * GIB if chosen.device == "cuda" else GIB // 4)
    note(f"raw: {rate}")
    tiers = Offload(
        optimizer="disk",
        optimizer_share=chosen.share,
        parameters=chosen.parameters,
        gradients=chosen.gradients,
        folder=chosen.folder,
        buffers=chosen.buffers,
    )
    layout = Layout(precision="bf16" if chosen.device == "cuda" else "fp32", compile=False, fuse=False, offload=tiers)
    accelerator = Accelerator(layout=layout, cpu=chosen.device == "cpu")
    with torch.device("meta"):
        model: Any = Transformer(ModelConfig(**SHAPES[chosen.model]))  # type: ignore[arg-type]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    if chosen.device == "cuda":
        torch.zeros(1, device="cuda")
    before = private_bytes()
    guard = MemoryGuard(spare=3 * GIB if chosen.device == "cuda" else GIB // 4)
    model, optimizer = accelerator.prepare(model, optimizer)
    store = offloaded(model).store
    note(f"{count / 1e9:.2f}B parameters offloaded, {store.nbytes / 1e9:.1f} GB of files")

    tokens = torch.randint(1000, (chosen.batch, chosen.length + 1), device=accelerator.device)
    losses, steps, shares, rates = [], [], [], []

    def report() -> None:
        # Of the step, of gradients in flight, and of the first write.
        buffers = 2 * tiers.buffers * tiers.buffer_bytes + (64 << 20)
        line = {
            "row": f"offload {chosen.model}, {chosen.share:g} on disk, gradients {chosen.gradients}, parameters "
            f"{chosen.parameters}",
            "parameters": count,
            "host_bytes_per_parameter": (guard.peak - before) / count,
            "host_bytes_per_parameter_less_buffers": (guard.peak - before - buffers) / count,
            "buffer_bytes": buffers,
            "file_bytes_per_parameter": store.nbytes / count,
            "step_seconds": steps,
            "disk_busy_share": shares,
            "gb_per_s": [one / 1e9 for one in rates],
            "raw_gb_per_s": {"read": rate.read / 1e9, "write": rate.write / 1e9},
            "device_gib": torch.cuda.max_memory_allocated() / GIB if chosen.device == "cuda" else 0.0,
            "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "losses": losses,
        }
        print(json.dumps(line), flush=True)

    while len(steps) < chosen.steps:
        if steps and time.perf_counter() - begun + 1.6 * steps[-1] > chosen.seconds:
            note("no time for another step")
            break
        start = time.perf_counter()
        sums = model(tokens[:, :-1], targets=tokens[:, 1:])
        loss = sums.total / sums.tokens
        loss_value = loss.item()
        # What is stepped in the backward begins there.
        (moved, busy), stepping = store.io.meter.now(), time.perf_counter()
        accelerator.backward(loss)
        if chosen.gradients != "step":
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            (moved, busy), stepping = store.io.meter.now(), time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        now, busy_now = store.io.meter.now()
        losses.append(loss_value)
        steps.append(end - start)
        shares.append((busy_now - busy) / (end - stepping))
        rates.append((now - moved) / max(busy_now - busy, 1e-9))
        note(f"step {len(steps)}: {steps[-1]:.1f} s, disk busy {shares[-1]:.3f}, {rates[-1] / 1e9:.2f} GB/s")
        report()
    # Freeing host memory page by page takes long; the files have no names.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
