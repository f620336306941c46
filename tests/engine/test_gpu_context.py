"""On a CUDA device: the kernels that ring attention is made of, and the loss with a split vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from piledriver.engine.context_parallel.ring_kernels import attend_part, attend_part_backward, merge
from piledriver.engine.shards.collectives import Group
from piledriver.engine.tensor_parallel.vocab_parallel_loss import split_cross_entropy
from piledriver.models.loss import plain_cross_entropy
from tests.engine.gpu import ON_GPU

pytestmark = ON_GPU


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [8, 2])
def test_parts_of_the_keys_merge_into_the_whole(dtype: torch.dtype, heads: int) -> None:
    """As a ring of two does it: own keys under the causal mask, then the first half of the other's with all queries."""
    torch.manual_seed(0)
    q = torch.randn(2, 8, 128, 64, device="cuda")
    k, v = torch.randn(2, 2, heads, 192, 64, device="cuda")
    gradient = torch.randn_like(q)
    exact_q, exact_k, exact_v = (x.clone().requires_grad_() for x in (q, k, v))
    seen = torch.ones(128, 192, dtype=torch.bool, device="cuda").tril(64)
    whole = F.scaled_dot_product_attention(exact_q, exact_k, exact_v, attn_mask=seen, scale=0.1, enable_gqa=True)
    whole.backward(gradient)
    q, k, v, gradient = (x.to(dtype) for x in (q, k, v, gradient))
    earlier, own = (k[:, :, :64], v[:, :, :64]), (k[:, :, 64:], v[:, :, 64:])
    out, lse = attend_part(q, *own, True, 0.1)
    out, lse = merge(out.float(), lse, *attend_part(q, *earlier, False, 0.1))
    off = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(out, whole.detach(), rtol=off, atol=off)
    rounded = out.to(dtype)
    grads = [
        attend_part_backward(gradient, q, *part, rounded, lse, causal, 0.1)
        for part, causal in ((earlier, False), (own, True))
    ]
    torch.testing.assert_close((grads[0][0] + grads[1][0]).float(), exact_q.grad, rtol=off, atol=off)
    for i, wanted in ((1, exact_k.grad), (2, exact_v.grad)):
        found = torch.cat([grad[i] for grad in grads], 2).float()
        torch.testing.assert_close(found, wanted, rtol=off, atol=2 * off * wanted.abs().max().item())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Group]:
    here = {"rank": 0, "world_size": 1, "device_id": torch.device("cuda", 0)}
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", **here)
    yield Group(str(dist.group.WORLD.group_name), 1, 0)
    dist.destroy_process_group()


def test_a_split_vocabulary_gives_the_same_loss(alone: Group) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", requires_grad=True)
    targets = torch.randint(1000, (512,), device="cuda")
    targets[:9] = -100
    options = {"z_loss": 1e-3, "softcap": 20.0}
    wanted = plain_cross_entropy(hidden, weight, targets, **options)
    wanted_grads = torch.autograd.grad(wanted.total / 503, (hidden, weight))
    found = split_cross_entropy(hidden, weight, targets, first=0, group=alone, chunk_tokens=100, **options)
    grads = torch.autograd.grad(found.total / 503, (hidden, weight))
    torch.testing.assert_close(found.total, wanted.total, rtol=1e-3, atol=0)
    for mine, theirs in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())
