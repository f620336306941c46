"""What recording every collective costs a step of about 20 ms: count, bytes, bandwidth, without synchronising.

    python benchmarks/observe.py

One process with gloo; a step computes for about 20 ms and reduces eight gradients. Processor time, plain and recorded
rounds in turn; the median of the ratios of neighbouring rounds. `us_per_collective` is from many small collectives.
DeepSpeed's logger, which synchronises each call, is not installed here and not compared.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from piledriver.observe.communication import CommunicationRecorder

ROUNDS, STEPS, COLLECTIVES = 40, 5, 8


def sized(seconds: float) -> torch.Tensor:
    """Return a matrix whose product with itself takes about this long."""
    size = 256
    while True:
        matrix = torch.randn(size, size)
        matrix @ matrix
        begin = time.process_time()
        matrix @ matrix
        if time.process_time() - begin > seconds or size > 8192:
            return matrix
        size = int(size * 1.15)


def cost(step: Any, count: int, recorder: Any) -> float:
    with recorder:
        begin = time.process_time()
        for _ in range(count):
            step()
        return (time.process_time() - begin) / count


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29653", "RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    matrix = sized(0.02)
    gradients = [torch.ones(4096) for _ in range(COLLECTIVES)]

    def step() -> None:
        matrix @ matrix
        for gradient in gradients:
            dist.all_reduce(gradient)

    def collective() -> None:
        dist.all_reduce(gradients[0])

    for _ in range(3):
        step()
    ratios, plain, calls = [], [], []
    recorder = CommunicationRecorder()  # one for the whole run, as in training
    for _ in range(ROUNDS):
        before = cost(step, STEPS, nullcontext())
        after = cost(step, STEPS, recorder)
        ratios.append(after / before)
        plain.append(before)
        calls.append(cost(collective, 200, recorder) - cost(collective, 200, nullcontext()))
    with CommunicationRecorder() as last:
        step()
    rows = last.summary()
    assert sum(row.count for row in rows) == COLLECTIVES
    each = statistics.median(calls)
    print(
        json.dumps(
            {
                "row": "observe",
                "step_ms": round(statistics.median(plain) * 1e3, 3),
                "collectives_per_step": COLLECTIVES,
                "us_per_collective": round(each * 1e6, 2),
                "slower_at_20_ms": round(COLLECTIVES * each / 0.02, 5),
                "slower_measured": round(statistics.median(ratios) - 1, 5),
            }
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
