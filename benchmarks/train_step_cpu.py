"""The demo's training step on one core: through `piledriver train`, against the same step in a plain torch loop.

    python benchmarks/train_step_cpu.py

The plain loop is what one would write by hand: the same shape and batch, torch's own layers, attention, cross-entropy,
`torch.optim.Muon` and fused AdamW, clipping, the learning rate set by hand, documents told apart by the same mask;
`peer_without_documents` leaves that mask out. Processor time of the process with one thread, so that other programs do
not count; the loops take steps in turn, and our time is everything between two steps: loading, logging, the display.
`ratio` is ours / peer, the median over pairs of neighbouring steps, and the interval that holds that median 95 times in
100 (by resampling the pairs).
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.corpus import ShardFileWriter, make_document
from piledriver.data import TokenizerTraining, tokenize_corpus, train_tokenizer
from piledriver.data.stream.token_stream import StreamConfig, open_stream
from piledriver.models import ModelConfig
from piledriver.optim import OptimizerConfig
from piledriver.train import DataConfig, TrainConfig, train

STEPS, WARMUP = 60, 8
SHAPE = ModelConfig(vocab_size=2048, dim=192, layers=4, heads=6, max_positions=256)
BATCH_TOKENS = 4096


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        gates, ups = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gates) * ups)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlainModel(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        blocks = [PlainBlock(shape.dim, shape.heads, shape.mlp_dim) for _ in range(shape.layers)]
        self.blocks, self.norm = nn.ModuleList(blocks), nn.RMSNorm(shape.dim, eps=1e-5)
        half = shape.dim // shape.heads // 2
        angles = torch.outer(torch.arange(shape.max_positions), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor, numbers: Tensor | None) -> Tensor:
        length = tokens.shape[1]
        if numbers is None:
            cos, sin, mask = self.cos[:length, None], self.sin[:length, None], None
        else:
            places = torch.arange(length)
            begins = torch.ones_like(numbers, dtype=torch.bool)
            begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
            inside = places - torch.where(begins, places, 0).cummax(dim=1).values
            cos, sin = self.cos[inside][:, :, None], self.sin[inside][:, :, None]
            mask = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (places[:, None] >= places)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PlainLoop:
    """A training loop as one writes it by hand."""

    def __init__(self, tokens: np.ndarray, boundary: int, *, documents: bool) -> None:
        self.model, self.tokens, self.boundary, self.documents = PlainModel(SHAPE), tokens, boundary, documents
        matrices = [p for p in self.model.blocks.parameters() if p.dim() == 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2] + [self.model.embedding.weight]
        muon = torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw")
        self.optimizers = [muon, torch.optim.AdamW(rest, lr=0.01, fused=True)]
        self.luck = np.random.default_rng(0)
        self.losses: list[float] = []

    def step(self) -> float:
        begun = time.process_time()
        length = SHAPE.max_positions
        starts = self.luck.integers(0, len(self.tokens) - length - 1, BATCH_TOKENS // length)
        rows = torch.from_numpy(np.stack([self.tokens[at : at + length + 1] for at in starts]).astype(np.int64))
        inputs, labels = rows[:, :-1], rows[:, 1:]
        numbers = (inputs == self.boundary).cumsum(dim=1) if self.documents else None
        loss = self.model(inputs, labels, numbers)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(loss))
        return time.process_time() - begun


class Turns:
    """Called by `train` between two of its steps: notes what the step cost, then lets the plain loops take theirs."""

    def __init__(self, *peers: PlainLoop) -> None:
        self.peers = peers
        self.rows: list[tuple[float, ...]] = []
        self.mark: float | None = None

    def __call__(self, model: object, world: object) -> dict[str, float]:
        time.sleep(0.005)  # the loader's thread reads ahead now: that is our time too
        ours = time.process_time()
        if self.mark is not None:
            self.rows.append((ours - self.mark, *(peer.step() for peer in self.peers)))
        self.mark = time.process_time()
        return {}


def make_tokens(folder: Path) -> Path:
    luck = random.Random(0)
    words = ["".join(luck.choices("abcdefghijklmnop", k=luck.randint(2, 8))) for _ in range(3000)]
    with ShardFileWriter(folder / "00000.jsonl.zst") as shard:
        for number in range(600):
            text = " ".join(luck.choices(words, k=luck.randint(20, 1200)))
            shard.write(make_document(text, source="words", origin=str(number), licence="CC0-1.0"))
    tokenizer = train_tokenizer(folder / "00000.jsonl.zst", TokenizerTraining(vocab_size=SHAPE.vocab_size))
    (folder / "tokenizer.json").write_bytes(tokenizer.content)
    tokenize_corpus(folder / "00000.jsonl.zst", folder / "tokenizer.json", folder / "tokens")
    return folder / "tokens"


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        tokens = make_tokens(Path(name))
        stream = open_stream(StreamConfig(tokens=str(tokens), seq_len=SHAPE.max_positions))
        flat = np.concatenate([np.asarray(shard.tokens) for shard in stream.tokens.shards])
        turns = Turns(*(PlainLoop(flat, stream.tokens.boundary, documents=documents) for documents in (True, False)))
        config = TrainConfig(
            model=SHAPE,
            data=DataConfig(tokens=str(tokens)),
            batch_tokens=BATCH_TOKENS,
            budget_tokens=BATCH_TOKENS * STEPS,
            out=str(Path(name) / "run"),
            optimizer=OptimizerConfig(kind="muon", lr=0.01),
            checkpoint_minutes=60,
            validate_steps=1,
            trackers=(),
            plots=False,
        )
        train(config, validate=turns)
    rows = turns.rows[WARMUP:]
    ratios = [row[0] / row[1] for row in rows]
    luck = random.Random(0)
    medians = sorted(statistics.median(luck.choices(ratios, k=len(ratios))) for _ in range(2000))
    ours, peer, bare = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        json.dumps(
            {
                "row": "train_step_cpu",
                "unit": "CPU seconds per step of 4096 tokens, one thread",
                "ours": round(ours, 4),
                "peer": round(peer, 4),
                "peer_without_documents": round(bare, 4),
                "limit": None,
                "ratio": round(statistics.median(ratios), 3),
                "ratio_95": [round(medians[50], 3), round(medians[1949], 3)],
                "steps": len(rows),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
