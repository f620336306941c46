"""A small training that saves every second step and goes on from the last checkpoint; run by the launch tests."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from piledriver.accelerator import Accelerator, InitProcessGroupKwargs
from piledriver.checkpoint import folder_for, latest

STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill-rank", type=int)
    parser.add_argument("--timeout-seconds", type=float)
    parser.add_argument("--wait-for-cut", type=int)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    handlers = []
    if args.timeout_seconds:
        handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout_seconds))]
    accelerator = Accelerator(kwargs_handlers=handlers)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(STEPS * 4, 4), torch.randn(STEPS * 4, 1))
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    found = latest(args.out)
    if found is not None:
        accelerator.load_state(found)
        step = int(found.name.removeprefix("checkpoint_"))
    if accelerator.is_main_process:
        attempts = args.out / "attempts.json"
        before = json.loads(attempts.read_text()) if attempts.exists() else []
        attempts.write_text(json.dumps([*before, step]))
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 2 == 0:
            accelerator.save_state(folder_for(args.out, step))
        if step == 5 and args.kill_rank == accelerator.process_index and found is None:
            os.kill(os.getpid(), signal.SIGKILL)
    assert step == STEPS, step
    if accelerator.is_main_process:
        torch.save(model.state_dict(), args.out / "final.pt")
    if args.wait_for_cut is not None:
        (args.out / f"ready-{args.wait_for_cut}").write_text("")
        while not (args.out / "go").exists():
            time.sleep(0.1)
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    accelerator.end_training()


if __name__ == "__main__":
    main()
