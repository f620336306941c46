"""Law 9: a model larger than the memory of one process trains, validates and publishes.

Each of four gloo processes is limited in its private memory (RLIMIT_DATA): the whole model with its gradients and
optimizer states cannot be built in one of them, a quarter of it can.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.patience import HANG_S
from tests.train.corpus import make_tokens

ROOM = 900 << 20
"""Bytes that a process may allocate beyond what it has after its imports."""
SHAPE = "{vocab_size: 512, dim: 640, layers: 10, heads: 10, max_positions: 32, tied: false}"
"""66M parameters: weights, gradients and two moments are 1.06 GB in fp32, a quarter of them 0.26 GB."""
LR = 0.001
CONFIG = f"""
model: {SHAPE}
data: {{tokens: %s}}
batch_tokens: 128
budget_tokens: 128
optimizer: {{lr: {LR}}}
trackers: []
plots: false
"""
# Imports once; each run is on processes that are forked from here.
RUNS = """
import resource, sys
import torch
import torch.distributed.fsdp, torch.distributed.pipelining, torch._dynamo
from piledriver.cli.main import main
import piledriver.accelerator.accelerator, piledriver.checkpoint, piledriver.evaluate.validation, piledriver.train.loop
from piledriver.runtime.launch.function import debug_launcher

def train(room, *words):
    torch.set_num_threads(1)
    # BLAS and autograd allocate their own buffers once, before the limit.
    warm = torch.randn(1, 8, 64, 64, requires_grad=True)
    (torch.nn.functional.scaled_dot_product_attention(warm, warm, warm, is_causal=True) @ warm).sum().backward()
    (torch.randn(512, 512, requires_grad=True) @ torch.randn(512, 512)).sum().backward()
    del warm
    used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
    if room:
        resource.setrlimit(resource.RLIMIT_DATA, (used + room,) * 2)
    assert main(["train", *words, "--debug"]) == 0

room, folder, *words = sys.argv[1:]
try:
    debug_launcher(train, (int(room), *words, f"out={folder}/alone"), 1)
except BaseException as error:
    open(f"{folder}/alone.txt", "w").write(str(error))
debug_launcher(train, (int(room), *words, f"out={folder}/limited", "layout.zero=3"), 4)
debug_launcher(train, (0, *words, f"out={folder}/free"), 1)
"""


def run_all(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "runs.py"
    script.write_text(RUNS)
    # Small stacks of threads, which count in full; no arenas, because memory that an allocator reserves before the
    # limit is set would not be counted when it is used; freed memory goes back to the system.
    command = f"ulimit -s 2048; exec {shlex.join([sys.executable, str(script), str(ROOM), str(folder), *words])}"
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MIMALLOC_ARENA_RESERVE": "0"}
    environment = {**os.environ, **allocator, "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts private memory on Linux only")
def test_a_model_larger_than_one_process_trains_validates_and_publishes(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, documents=40)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG % tokens)
    words = [str(config), "--validation", str(tmp_path / "clean.jsonl.zst"), "--validation-documents", "1"]
    # One limited process, four of them, and one with room for everything.
    run = run_all(tmp_path, *words)
    assert run.returncode == 0, run.stdout + run.stderr
    alone, limited, free = tmp_path / "alone.txt", tmp_path / "limited", tmp_path / "free"
    assert alone.exists(), "one process has room for the whole model: the limit proves nothing"
    # torch's words on arm64 and on x86
    assert "not enough memory" in alone.read_text() or "can't allocate memory" in alone.read_text(), alone.read_text()
    # The same loss, and the same model after the step.
    shown = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (limited, free)]
    (small,), (whole,) = shown
    assert [small["loss"], small["validation/all"]] == pytest.approx([whole["loss"], whole["validation/all"]], rel=1e-5)
    published, expected = (load_file(out / "model" / "model.safetensors") for out in (limited, free))
    assert {name: value.shape for name, value in published.items()} == {n: v.shape for n, v in expected.items()}
    # Where a gradient is all but zero, rounding decides the sign of AdamW's first step.
    apart = torch.cat([(published[name] - expected[name]).abs().flatten() for name in expected])
    assert apart.max() <= 2.1 * LR
    assert apart.mean() <= 1e-3 * LR
