"""Logits that nobody reads are not computed; whatever reads or changes them gets exactly what plain logits give."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.engine.errors import EngineError
from piledriver.engine.fused.lazy_logits import LazyLogits, lazy_linear, mark_stale

ROWS, LENGTH, DIM, WORDS = 2, 5, 8, 11
Loss = Callable[[Tensor, Tensor], Tensor]


def both(loss_of: Loss, *, bias: bool = True) -> tuple[list[Tensor | None], list[Tensor | None], LazyLogits]:
    """Loss and gradients with plain logits and with lazy ones."""
    found: list[list[Tensor | None]] = []
    for lazy in (False, True):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(ROWS, LENGTH, DIM, generator=generator, requires_grad=True)
        weight = torch.randn(WORDS, DIM, generator=generator, requires_grad=True)
        offset = torch.randn(WORDS, generator=generator, requires_grad=True) if bias else None
        targets = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
        targets[0, 1] = -100
        logits = (lazy_linear if lazy else F.linear)(hidden * 1.0, weight, offset)
        first = logits
        loss = loss_of(logits, targets)
        if loss.requires_grad:
            loss.sum().backward()
        found.append([loss.detach(), hidden.grad, weight.grad, None if offset is None else offset.grad])
    assert isinstance(first, LazyLogits)
    return found[0], found[1], first


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(logits[..., :-1, :].contiguous().view(-1, WORDS), targets[..., 1:].reshape(-1))


def padded(logits: Tensor, targets: Tensor) -> Tensor:
    targets = F.pad(targets, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, WORDS), targets.view(-1))


def capped(logits: Tensor, targets: Tensor) -> Tensor:
    logits = torch.tanh(logits / 3.0) * 3.0
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), reduction="sum")


NEVER_COMPUTED: dict[str, Loss] = {
    "shifted": shifted,
    "padded": padded,
    "capped": capped,
    "scaled": lambda x, t: F.cross_entropy((x * 0.5 / 3).flatten(0, 1), t.flatten()),
    "scaled, then capped": lambda x, t: F.cross_entropy(7 * torch.tanh(x * 0.1).flatten(0, 1), t.flatten()),
    "transposed": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "permuted": lambda x, t: F.cross_entropy(x.permute(0, 2, 1), t.clamp(min=0), ignore_index=0),
    "some rows": lambda x, t: F.cross_entropy(x[:1, 2:].reshape(-1, WORDS), t[:1, 2:].flatten()),
}


@pytest.mark.parametrize("name", list(NEVER_COMPUTED))
@pytest.mark.parametrize("bias", [False, True])
def test_a_loss_is_computed_without_logits(name: str, bias: bool) -> None:
    expected, found, logits = both(NEVER_COMPUTED[name], bias=bias)
    assert logits.product.consumed
    assert not logits.product.read
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def change_view(logits: Tensor, targets: Tensor) -> Tensor:
    logits.view(-1, WORDS)[:, 3] = -5.0
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def change_part(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.view(-1, WORDS)
    logits[0].zero_()
    return F.cross_entropy(flat, targets.view(-1))


def doubled_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: 2 * gradient)
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def without_graph(logits: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        flat = logits.view(-1, WORDS)
    return F.cross_entropy(flat, targets.view(-1)) + logits.mean()


def read_later(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))
    hits = (logits.argmax(-1) == targets).float().mean()
    return loss + hits + logits.softmax(-1)[0, 0, 0]


def new_leaf(logits: Tensor, targets: Tensor) -> Tensor:
    leaf = logits.detach().requires_grad_()
    return F.cross_entropy(leaf.view(-1, WORDS), targets.view(-1))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


COMPUTED: dict[str, Loss] = {
    "smoothed": lambda x, t: F.cross_entropy(x.view(-1, WORDS), t.view(-1), label_smoothing=0.1),
    "each token": lambda x, t: F.cross_entropy(x.view(-1, WORDS), t.view(-1), reduction="none"),
    "class weights": lambda x, t: F.cross_entropy(x.view(-1, WORDS), t.view(-1), weight=torch.arange(11.0)),
    "one row": lambda x, t: F.cross_entropy(x[0], t[0]),
    "part of the vocabulary": lambda x, t: F.cross_entropy(x[..., :7].reshape(-1, 7), t.flatten().clamp(max=6)),
    "in place": lambda x, t: F.cross_entropy(x.mul_(2.0).view(-1, WORDS), t.view(-1)),
    "change of a view": change_view,
    "change of a part": change_part,
    "hook on the gradient": doubled_gradient,
    "view without a graph": without_graph,
    "metrics after the loss": read_later,
    "log-probabilities": lambda x, t: x.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]),
    "arithmetic": lambda x, t: (x @ torch.ones(WORDS, 2)) + x.sum() + torch.stack([x, x]).sum(),
    "autograd function": lambda x, t: Tripled.apply(x),  # type: ignore[no-untyped-call]
    "detached": lambda x, t: F.cross_entropy(x.detach().view(-1, WORDS), t.view(-1)) + x.mean(),
    "new leaf": new_leaf,
}


@pytest.mark.parametrize("name", list(COMPUTED))
def test_code_that_reads_or_changes_logits_gets_what_it_always_got(name: str) -> None:
    expected, found, logits = both(COMPUTED[name])
    assert logits.product.read
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def lazy() -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(ROWS, LENGTH, DIM, requires_grad=True), torch.randn(WORDS, DIM, requires_grad=True)
    return lazy_linear(hidden, weight, None), F.linear(hidden, weight), weight


def test_it_looks_like_a_tensor() -> None:
    logits, plain, _ = lazy()
    assert (logits.shape, logits.dtype, logits.device) == (plain.shape, plain.dtype, plain.device)
    assert logits.requires_grad
    assert not logits.product.read  # type: ignore[attr-defined]
    assert repr(lazy()[0]).startswith("tensor(")
    assert lazy()[0].detach().numpy().shape == (ROWS, LENGTH, WORDS)
    for copied in (lambda x: torch.load(saved(x)), lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy):
        logits, plain, _ = lazy()
        torch.testing.assert_close(copied(logits.detach()), plain.detach())
    logits, plain, _ = lazy()
    assert logits[0, 0].tolist() == pytest.approx(plain[0, 0].tolist())


def saved(tensor: Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


def test_a_late_read_is_an_error_not_a_wrong_number() -> None:
    logits, _, weight = lazy()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(EngineError, match="not read before the weights changed"):
        logits.argmax(-1)
    # A kernel that writes weights past torch's version counter: the hook of the step says it.
    logits, _, _ = lazy()
    mark_stale()
    with pytest.raises(EngineError, match=r"optimizer\.step"):
        F.cross_entropy(logits.view(-1, WORDS), torch.zeros(ROWS * LENGTH, dtype=torch.long))


def test_a_gradient_that_was_never_computed_is_an_error() -> None:
    logits, _, _ = lazy()
    F.cross_entropy(logits.view(-1, WORDS), torch.zeros(ROWS * LENGTH, dtype=torch.long))
    with pytest.raises(EngineError, match="gradient of logits"):
        logits.retain_grad()
