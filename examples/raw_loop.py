"""A PyTorch loop with `Accelerator`: one process or many, CPU or GPU, exact gradient accumulation, resumable.

python examples/raw_loop.py
piledriver launch --nproc 2 examples/raw_loop.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from piledriver import Accelerator, set_seed


def main() -> None:
    """Fit a small regression and save a checkpoint that loads on any number of processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", default="raw_loop_checkpoint")
    options = parser.parse_args()

    set_seed(0)
    x = torch.randn(512, 8)
    data = TensorDataset(x, x @ torch.randn(8, 1))
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.9)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(options.epochs):
        for inputs, targets in loader:
            # `count` makes the gradient the mean over all samples of a window, on all ranks and micro-batches.
            with accelerator.accumulate(model, count=len(inputs)):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        # Every sample counts once, also where the last batch was padded to be equal on all ranks.
        with torch.no_grad():
            errors = [accelerator.gather_for_metrics((model(inputs) - targets).square()) for inputs, targets in loader]
        accelerator.print(f"epoch {epoch}: mean squared error {torch.cat(errors).mean():.4f}")
    accelerator.save_state(options.checkpoint)
    accelerator.end_training()


if __name__ == "__main__":
    main()
