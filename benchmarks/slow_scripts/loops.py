"""Slow loops: each function is a generator that takes one training step for each item; `slow=False` is its cure."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


def perceptron(width: int, layers: int, device: str = "cpu") -> nn.Sequential:
    return nn.Sequential(*[one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())]).to(device)


def update(optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Slow(Dataset[Tensor]):
    """Samples that wait for storage."""

    def __init__(self, width: int) -> None:
        self.sample = torch.randn(width)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.002)
        return self.sample


def slow_loader(slow: bool, device: str) -> Iterator[None]:
    model = perceptron(768, 48 if device == "cuda" else 8, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count = 12 if device == "cuda" else 4
    workers: dict[str, Any] = {} if slow else {"num_workers": count, "prefetch_factor": 4, "persistent_workers": True}
    for batch in DataLoader(Slow(768), batch_size=16, **workers):
        update(optimizer, model(batch.to(device)).square().mean())
        yield


def tiny_kernels(slow: bool, device: str) -> Iterator[None]:
    if device == "cuda":
        yield from _tiny_graphs(slow)
        return
    model = nn.ModuleDict({"body": perceptron(512, 4), "gate": nn.Linear(16, 16)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows, batch = torch.randn(300, 16), torch.randn(128, 512)
    while True:
        if slow:
            gates = torch.stack([torch.tanh(model["gate"](row)).square().mean() for row in rows])
        else:
            gates = torch.tanh(model["gate"](rows)).square().mean(-1)
        update(optimizer, model["body"](batch).square().mean() + gates.mean())
        yield


def _tiny_graphs(slow: bool) -> Iterator[None]:
    model = perceptron(256, 60, "cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(16, 256, device="cuda")
    if slow:
        while True:
            update(optimizer, model(batch).square().mean())
            yield
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            update(optimizer, model(batch).square().mean())
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(optimizer, model(batch).square().mean())
    while True:
        graph.replay()
        yield


def host_synchronisation(slow: bool, device: str) -> Iterator[None]:
    model = perceptron(2048, 48, device).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    while True:
        x = batch
        for layer in model:
            x = layer(x)
            if slow and float(x.flatten()[0]) > 1e9:
                raise ValueError("diverged")
        update(optimizer, x.square().mean())
        yield


def fp32_products(slow: bool, device: str) -> Iterator[None]:
    model = perceptron(4096, 6, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(8192, 4096, device=device)
    while True:
        with torch.autocast(device, torch.bfloat16, enabled=not slow):
            loss = model(batch).float().square().mean()
        update(optimizer, loss)
        yield


class Elementwise(nn.Module):
    """A block whose time goes to operators that move memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = y * torch.sigmoid(1.702 * y) * self.scale
        y = functional.dropout(y, 0.1) + x
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return torch.tanh(y) * self.scale + 0.1 * y


def not_compiled(slow: bool, device: str) -> Iterator[None]:
    model = nn.Sequential(*[Elementwise(1024) for _ in range(6)]).to(device, torch.bfloat16)
    if not slow:
        for block in model:
            block.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(32768, 1024, device=device, dtype=torch.bfloat16)
    while True:
        update(optimizer, model(batch).float().square().mean())
        yield


def recompilation(slow: bool, device: str) -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    model = perceptron(512, 12, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(256, 512, device=device)

    def forward(x: Tensor, temperature: Any, name: str) -> Tensor:
        return torch.as_tensor((model(x) / temperature).square().mean() + (0.0 if name else 1.0))

    compiled = torch.compile(forward, backend="aot_eager")
    step = 0
    while True:
        step += 1
        update(optimizer, compiled(batch, torch.tensor(1.5), f"step {step}" if slow else "step"))
        yield


def small_buckets(slow: bool, device: str) -> Iterator[None]:
    import torch.distributed as dist

    model = perceptron(64, 80, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 64, device=device)
    while True:
        model(batch).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if slow:
            for gradient in gradients:
                dist.all_reduce(gradient)
        else:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        optimizer.step()
        optimizer.zero_grad()
        yield


def straggler(slow: bool, device: str) -> Iterator[None]:
    import torch.distributed as dist

    model = perceptron(512, 6, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mine = 512 if slow and dist.get_rank() == 1 else 128
    batch = torch.randn(mine, 512, device=device)
    while True:
        model(batch).square().mean().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        optimizer.step()
        optimizer.zero_grad()
        yield


def checkpoint_stall(slow: bool, device: str) -> Iterator[None]:
    model = perceptron(1024, 16, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(128, 1024, device=device)
    writer: threading.Thread | None = None
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state.pt")
        step = 0
        while True:
            update(optimizer, model(batch).square().mean())
            step += 1
            if step % 4 == 0 and slow:
                torch.save(model.state_dict(), path)
            elif step % 4 == 0:
                if writer is not None:
                    writer.join()
                state = {name: value.clone() for name, value in model.state_dict().items()}
                writer = threading.Thread(target=torch.save, args=(state, path))
                writer.start()
            yield


def memory_fragmentation(slow: bool, device: str) -> Iterator[None]:
    model = perceptron(2048, 12, device).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sizes = [8192, 10240, 12288, 14336]
    step = 0
    while True:
        batch = torch.randn(sizes[step % 4], 2048, device=device, dtype=torch.bfloat16)
        update(optimizer, model(batch).square().mean())
        del batch
        if slow:
            torch.cuda.empty_cache()
        step += 1
        yield


def micro_batch(slow: bool, device: str) -> Iterator[None]:
    width, layers = (2048, 12) if device == "cuda" else (1024, 6)
    model = perceptron(width, layers, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(16, width, device=device)
    while True:
        for part in batch.split(1 if slow else 16):
            (model(part).square().mean() * part.shape[0] / 16).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


class Language(nn.Module):
    """A small causal model over ids."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, width), nn.Linear(width, 1000)
        self.blocks = perceptron(width, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return torch.as_tensor(self.head(self.blocks(self.embed(input_ids))))


def padding(slow: bool, device: str) -> Iterator[None]:
    model = Language(1024).to(device, torch.bfloat16) if device == "cuda" else Language(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    rows, longest, real = (256, 512, 128) if device == "cuda" else (8, 256, 64)
    ids = torch.randint(1, 1000, (rows, longest), device=device)
    mask = torch.ones_like(ids)
    if slow:
        ids[:, real:], mask[:, real:] = 0, 0
    else:  # the same tokens, packed into fewer rows
        ids, mask = ids[: rows * real // longest], mask[: rows * real // longest]
    while True:
        logits = model(input_ids=ids, attention_mask=mask)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        update(optimizer, (loss * mask.flatten()).sum() / mask.sum())
        yield


LOOPS = {
    "slow loader": (slow_loader, "cpu", 1),
    "tiny kernels": (tiny_kernels, "cpu", 1),
    "host synchronisation": (host_synchronisation, "cuda", 1),
    "fp32 products": (fp32_products, "cuda", 1),
    "not compiled": (not_compiled, "cuda", 1),
    "recompilation": (recompilation, "cpu", 1),
    "small buckets": (small_buckets, "cpu", 2),
    "straggler": (straggler, "cpu", 2),
    "checkpoint stall": (checkpoint_stall, "cpu", 1),
    "memory fragmentation": (memory_fragmentation, "cuda", 1),
    "micro-batch": (micro_batch, "cpu", 1),
    "padding": (padding, "cpu", 1),
}
"""The rule that must come first -> the loop, the device that it needs, and its processes."""
