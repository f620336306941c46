"""A `Layout` shards a model: the loop of raw_loop.py with ZeRO 3, a Transformer and no change but the layout.

piledriver launch --nproc 2 examples/layout_loop.py
piledriver launch --nproc 4 examples/layout_loop.py --tp 2
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader

from piledriver import Accelerator, Layout, Transformer
from piledriver.models import ModelConfig


def main() -> None:
    """Train a small Transformer whose parameters, gradients and optimizer states are sharded over the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--zero", type=int, default=3, help="0 replicate, 1 shard optimizer states, 2 gradients, 3 all")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    options = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(layout=Layout(zero=options.zero, tp=options.tp))
    # On the meta device: each rank allocates and initialises its own shards only, when the model is prepared.
    with torch.device("meta"):
        model = Transformer(ModelConfig(vocab_size=256, dim=64, layers=2, heads=4, max_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sequences = (torch.arange(65)[None] * torch.arange(1, 129)[:, None]) % 256  # counting in steps of 1 to 128
    loader = DataLoader(sequences, batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    while step < options.steps:
        for tokens in loader:
            sums = model(tokens[:, :-1], tokens[:, 1:])
            loss = sums.total / sums.tokens
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")
            if step == options.steps:
                break
    if accelerator.is_main_process:
        print(accelerator.memory_report())
    accelerator.end_training()


if __name__ == "__main__":
    main()
