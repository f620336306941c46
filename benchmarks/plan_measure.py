"""Measure rows of `plan_grid.py` on this machine's device: peaks, bytes by phase, the median step.

`Worker` runs them in a process of its own, so that a row that hangs or dies costs only itself. Several workers compile
at once; only one of them takes its measurement at a time, while the others are stopped.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from plan_grid import config_of_row

GIB = 2**30
_STARTED = 60.0
"""Seconds that a process may take to import everything."""


class Meter:
    """Peaks and times of the device; a CPU has no peaks."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda if torch.cuda.is_available() else None

    def peaks(self) -> tuple[float, float]:
        """Return the largest bytes allocated and reserved since the last reset, in GiB."""
        if self.cuda is None:
            return 0.0, 0.0
        return self.cuda.max_memory_allocated() / GIB, self.cuda.max_memory_reserved() / GIB

    def now(self) -> float:
        """Return the bytes allocated, in GiB."""
        return 0.0 if self.cuda is None else self.cuda.memory_allocated() / GIB

    def reset(self, *, empty: bool = False) -> None:
        """Forget the peaks, and with `empty` what the allocator keeps."""
        if self.cuda is not None:
            if empty:
                gc.collect()
                self.cuda.empty_cache()
            self.cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda is not None:
            self.cuda.synchronize()


def measure(
    shape: str,
    sequences: int,
    layout: dict[str, Any],
    optimizer: str,
    accumulation: int,
    *,
    profile: str | None = None,
    steps: int = 12,
    tiny: bool = False,
    alone: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run steps of one layout as the training loop does; return peaks, phases, the median step and its parts.

    `profile` is a file for the kernels of one step; those of its optimizer go to one beside it. `alone` is called once
    what compiles is compiled: it returns when nothing else runs on the machine.
    """
    import torch

    from piledriver.accelerator import Accelerator
    from piledriver.engine import Layout
    from piledriver.kernels.cross_entropy import default_chunk_tokens
    from piledriver.models import Transformer
    from piledriver.optim import OptimizerConfig, build_optimizer

    meter = Meter()
    config, length = config_of_row(shape, tiny=tiny)
    torch._dynamo.reset()
    meter.reset(empty=True)
    fields = dict(layout)
    if meter.cuda is None:
        fields |= {"compile": False, "precision": "fp32"}
        fields.pop("recompute_norms", None)
    accelerator = Accelerator(layout=Layout(**fields), gradient_accumulation_steps=accumulation)
    with torch.device("meta"):
        model = Transformer(config)
    made = build_optimizer(model, OptimizerConfig(kind=optimizer, lr=1e-4))
    model = accelerator.prepare_model(model)
    made = accelerator.prepare_optimizer(made)
    tokens = torch.randint(config.vocab_size, (sequences, length + 1), device=accelerator.device)
    phases: dict[str, float] = {}
    blocks = list(model.blocks.values())

    def step(noting: bool = False, update: bool = True, lap: Callable[[str], None] = lambda _: None) -> None:
        for _ in range(accumulation):
            with accelerator.accumulate(model):
                if noting:
                    phases["before the forward"] = meter.now()
                sums = model(tokens[:, :-1], targets=tokens[:, 1:])
                lap("forward")
                if noting:
                    phases["after the forward"], phases["peak of the forward"] = meter.now(), meter.peaks()[0]
                    meter.reset()
                accelerator.backward(sums.total / sums.tokens)
                lap("backward")
                if noting:
                    phases["after the backward"], phases["peak of the backward"] = meter.now(), meter.peaks()[0]
                    meter.reset()
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                lap("clip")
                if update:
                    made.step()
                    made.zero_grad(set_to_none=True)
                    lap("update")

    begun = time.perf_counter()
    step()
    meter.wait()
    alone()
    step()
    meter.wait()
    compile_seconds = time.perf_counter() - begun
    meter.reset()
    step(noting=True)
    meter.wait()
    phases["peak of the step"] = meter.peaks()[0]
    meter.reset()
    times = []
    end = time.perf_counter() + 0.7
    while len(times) < min(3, steps) or (time.perf_counter() < end and len(times) < steps):
        begun = time.perf_counter()
        step()
        meter.wait()
        times.append(time.perf_counter() - begun)
    allocated, reserved = meter.peaks()
    laps = [parts_of(step, meter) for _ in range(2)]
    if profile:
        save_profile(step, profile, meter)
        step(update=False)
        save_profile(made.step, profile.replace(".txt", ".optimizer.txt"), meter)
    return {
        "allocated": allocated,
        "reserved": reserved,
        "seconds": statistics.median(times),
        "fastest": min(times),
        "compile_seconds": round(compile_seconds, 1),
        "phases": phases,
        "parts": {name: round(min(one[name] for one in laps), 6) for name in laps[0]},
        "blocks": len(blocks),
        "loss_chunk": default_chunk_tokens(config.vocab_size, accelerator.device.type, config.dim),
    }


def parts_of(step: Callable[..., None], meter: Meter) -> dict[str, float]:
    """Return the seconds of the parts of one step, each waited for: more than the step, where they overlap."""
    found: dict[str, float] = {}
    meter.wait()
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        meter.wait()
        now = time.perf_counter()
        found[name] = found.get(name, 0.0) + now - last
        last = now

    step(lap=lap)
    return found


def save_profile(run: Any, path: str, meter: Meter) -> None:
    """Write the kernels and the operators of a call, with their seconds."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if meter.cuda is not None:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    meter.wait()
    begun = time.perf_counter()
    with torch.profiler.profile(activities=kinds, record_shapes=True) as made:
        run()
        host = time.perf_counter() - begun
        meter.wait()
        whole = time.perf_counter() - begun
    order = "self_cpu_time_total" if meter.cuda is None else "self_cuda_time_total"
    launches = sum(one.count for one in made.key_averages() if "LaunchKernel" in one.key)
    table = made.key_averages(group_by_input_shape=True).table(sort_by=order, row_limit=60, max_name_column_width=60)
    Path(path).write_text(f"host {host:.4f} s, whole {whole:.4f} s, {launches} launches\n{table}\n", encoding="utf-8")


def work() -> None:
    """Measure the rows that come as lines of JSON; answer each with a line."""
    import torch

    import piledriver.accelerator
    import piledriver.optim  # noqa: F401

    def alone() -> None:
        print(json.dumps({"waits": True}), flush=True)
        sys.stdin.readline()

    print(json.dumps({"ready": True}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        try:
            if "calibrate" in asked or "host" in asked:
                alone()
                answer = calibrated(asked["calibrate"]) if "calibrate" in asked else host_times(asked["host"])
            else:
                answer = measure(**asked, alone=alone)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(json.dumps({"answer": answer}), flush=True)


def calibrated(seconds: float) -> dict[str, Any]:
    """Return this machine's rates."""
    from piledriver.plan.hardware.calibrate import calibrate

    return calibrate(seconds=seconds, save=False)[1]


def host_times(seconds: float) -> dict[str, Any]:
    """Return the host's microseconds of eager blocks."""
    from plan_host import census

    return {"cases": list(census(seconds))}


class Worker:
    """A process that measures rows; one that does not answer in time is replaced."""

    def __init__(self, team: list[Worker], turn: threading.Lock) -> None:
        self.team, self.turn = team, turn
        team.append(self)
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"},
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout, self.lines), daemon=True).start()
        self.ready = False

    @staticmethod
    def _read(stream: Any, lines: queue.Queue[str]) -> None:
        for line in stream:
            lines.put(line)

    def _line(self, keys: Sequence[str], seconds: float) -> tuple[str, Any]:
        end = time.monotonic() + seconds
        while True:
            line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            found = json.loads(line) if line.startswith('{"') else {}
            for key in keys:
                if key in found:
                    return key, found[key]

    def _send(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def _others(self, number: signal.Signals) -> None:
        for other in self.team:
            if other is not self and other.process.poll() is None:
                for process in family(other.process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of the process, or an error if none comes in time."""
        try:
            if not self.ready:
                self.ready = self._line(("ready",), _STARTED)[1]
            self._send(json.dumps(question))
            kind, answer = self._line(("waits", "answer"), seconds)
            if kind == "waits":
                with self.turn:
                    self._others(signal.SIGSTOP)
                    try:
                        self._send("")
                        answer = self._line(("answer",), seconds)[1]
                    finally:
                        self._others(signal.SIGCONT)
            found: dict[str, Any] = answer
            return found
        except (queue.Empty, BrokenPipeError):
            self.close()
            self._start()
            return {"error": f"no answer in {seconds:.0f} s"}

    def close(self) -> None:
        """End the process and what it started."""
        if self.process.poll() is None:
            for process in reversed(family(self.process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.wait()


def family(process: int) -> list[int]:
    """Return a process and all that it started, compilers in sessions of their own too."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [process]
    for one in found:
        found += parents.get(one, [])
    return found


if __name__ == "__main__":
    work()
