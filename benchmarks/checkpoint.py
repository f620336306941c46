"""How long a training step waits for a checkpoint: asynchronous save, plain save, `torch.save`, DCP's `async_save`.

Per kind: `blocked_s` is how long the call holds the loop; `window_s` is how much longer a window of steps takes when a
save lands in it and is waited for at its end, so that work which only moved into the background shows as well.
`copy_s` is the floor: one copy of the state to host memory that is already there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from piledriver.checkpoint import Checkpointer, Contents

LAYERS = 8


def build(parameters: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    width = int((parameters / LAYERS) ** 0.5) // 8 * 8
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return model, optimizer, torch.randn(32 if device == "cpu" else 4096, width, device=device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parameters", type=float, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--window", type=int, default=None)
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    if not on_gpu:
        torch.set_num_threads(1)  # leaves a core for the save, on a machine with two
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")  # also from DCP's own thread
    model, optimizer, batch = build(int(args.parameters or (100e6 if on_gpu else 4e6)), args.device)
    window = args.window or (40 if on_gpu else 10)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()

    def steps(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return time.perf_counter() - begin

    steps(3)
    root = Path(tempfile.mkdtemp())
    kinds = savers(model, optimizer, root)
    plain_window = statistics.median(steps(window) for _ in range(args.repeats))
    found: dict[str, dict[str, float]] = {}
    for name, (save, wait) in kinds.items():
        blocked, windows = [], []
        for repeat in range(args.repeats + 1):
            target = root / f"{name}-{repeat}"
            begin = time.perf_counter()
            save(target)
            held = time.perf_counter() - begin
            steps(window)
            wait()
            if repeat:  # the first one pays for buffers and for a plan
                blocked.append(held)
                windows.append(time.perf_counter() - begin - plain_window)
            shutil.rmtree(target, ignore_errors=True)
            target.unlink(missing_ok=True) if target.is_file() else None
        found[name] = {"blocked_s": statistics.median(blocked), "window_s": statistics.median(windows)}
    shutil.rmtree(root)
    state = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    result = {
        "row": "asynchronous save: seconds that a step waits, against torch.save",
        "ours": round(found["asynchronous"]["blocked_s"], 4),
        "peer": round(found["torch_save"]["blocked_s"], 4),
        "limit": "at most the time of copying the state to host memory, times 1.5",
        "ratio": round(found["asynchronous"]["blocked_s"] / found["torch_save"]["blocked_s"], 4),
        "copy_s": round(copy_time(state), 4),
        "bytes": sum(tensor.nbytes for tensor in state),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "step_s": round(plain_window / window, 4),
        **{name: {key: round(value, 4) for key, value in kind.items()} for name, kind in found.items()},
    }
    print(json.dumps(result))


def savers(
    model: nn.Module, optimizer: torch.optim.Optimizer, root: Path
) -> dict[str, tuple[Callable[[Path], object], Callable[[], object]]]:
    """Each way to save, and how to wait for it."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    contents = Contents(models=[model], optimizers=[optimizer])
    saver = Checkpointer()
    pending: list[object] = []

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def dcp(target: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pending.append(async_save(state(), checkpoint_id=target, no_dist=True))

    def dcp_wait() -> None:
        while pending:
            pending.pop().result()  # type: ignore[attr-defined]

    return {
        "asynchronous": (lambda target: saver.save(target, contents, asynchronous=True), saver.wait),
        "plain": (lambda target: saver.save(target, contents), saver.wait),
        "torch_save": (lambda target: torch.save(state(), target), lambda: None),
        "dcp_async_save": (dcp, dcp_wait),
    }


def copy_time(state: list[torch.Tensor]) -> float:
    buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.device.type == "cuda") for t in state]
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        for buffer, tensor in zip(buffers, state, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main()
