"""The law of packing: a document in a packed row gives what it gives alone, whatever the kernel."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.core.errors import UsageError
from piledriver.kernels.attention import document_boundaries, positions_in_documents
from piledriver.models import Transformer, make_masks
from tests.models.shapes import SHAPES

lengths_of_rows = st.integers(2, 24).flatmap(
    lambda total: st.lists(
        st.lists(st.integers(1, total), min_size=1, max_size=5).map(lambda parts: _fill(parts, total)),
        min_size=1,
        max_size=3,
    )
)


def _fill(parts: list[int], total: int) -> list[int]:
    """Cut the list so that it sums to `total` exactly."""
    kept: list[int] = []
    for part in [*parts, total]:
        kept.append(min(part, total - sum(kept)))
        if sum(kept) == total:
            break
    return [part for part in kept if part]


def ids_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)) * 7 % 5, torch.tensor(row)) for row in rows])


@pytest.mark.parametrize("name", SHAPES)
def test_packed_equals_alone(name: str) -> None:
    model = Transformer(SHAPES[name])
    rows = [[3, 1, 12, 4], [20]]
    tokens = torch.randint(61, (2, 20))
    with torch.no_grad():
        packed = model(tokens, masks=make_masks(model.config, 20, "cpu", ids_of(rows)))
        for row, documents in enumerate(rows):
            begin = 0
            for length in documents:
                part = slice(begin, begin + length)
                torch.testing.assert_close(
                    packed[row, part], model(tokens[row : row + 1, part])[0], atol=2e-5, rtol=1e-4
                )
                begin += length


def test_packed_equals_alone_in_gradients() -> None:
    config = SHAPES["window"]
    model, tokens = Transformer(config), torch.randint(61, (1, 16))
    targets = tokens.roll(-1, dims=1)
    model(tokens, targets, masks=make_masks(config, 16, "cpu", ids_of([[9, 7]]))).total.backward()
    packed = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    for part in (slice(0, 9), slice(9, 16)):
        model(tokens[:, part], targets[:, part]).total.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, packed[key], atol=1e-4, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", ["llama", "window", "alibi", "capped", "alibi-capped"])
def test_block_mask_equals_dense_mask(name: str) -> None:
    config = SHAPES[name]
    model, tokens, ids = Transformer(config), torch.randint(61, (2, 20)), ids_of([[3, 1, 12, 4], [20]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CPU the block mask runs by the formula, and says that it is slow
        for documents in (ids, None):
            flex = model(tokens, masks=make_masks(config, 20, "cpu", documents, kernel="flex"))
            dense = model(tokens, masks=make_masks(config, 20, "cpu", documents, kernel="reference"))
            torch.testing.assert_close(flex, dense, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["auto", "flex"])
def test_new_documents_need_no_new_graph(kernel: str) -> None:
    config = SHAPES["capped"]
    model, tokens = Transformer(config), torch.randint(61, (2, 20))
    rows_of_batches = ([[3, 1, 12, 4], [20]], [[20], [10, 10]], [[1] * 20, [7, 13]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [make_masks(config, 20, "cpu", ids_of(rows), kernel=kernel) for rows in rows_of_batches]
        expected = [model(tokens, masks=masks) for masks in made]
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for masks, logits in zip(made, expected, strict=True):
            torch.testing.assert_close(compiled(tokens, masks=masks), logits)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.torch.jit.script", "ignore:.*use of fork", "ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["auto", "flex", "varlen", "sdpa"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_every_kernel_agrees_on_a_gpu(kernel: str, kv_heads: int) -> None:
    from piledriver.models import ModelConfig

    config = ModelConfig(vocab_size=61, dim=512, layers=2, heads=8, kv_heads=kv_heads, mlp_dim=256, sliding_window=100)
    model = Transformer(config)
    tokens, ids = torch.randint(61, (2, 256)), ids_of([[100, 1, 120, 35], [256]])
    expected = model(tokens, tokens, masks=make_masks(config, 256, "cpu", ids)).cross_entropy
    model.cuda().compute_dtype = torch.bfloat16
    masks = make_masks(config, 256, "cuda", ids.cuda(), kernel=kernel)
    for run in (model, torch.compile(model, fullgraph=True)):
        sums = run(tokens.cuda(), tokens.cuda(), masks=masks)
        sums.total.backward()
        torch.testing.assert_close(sums.cross_entropy.cpu(), expected, rtol=0.02, atol=0.0)
    torch.compiler.reset()


@given(lengths_of_rows)
@settings(max_examples=50, deadline=None)
def test_positions_and_boundaries_say_where_documents_begin(rows: list[list[int]]) -> None:
    total = sum(rows[0])
    rows = [row for row in rows if sum(row) == total]
    positions = positions_in_documents(ids_of(rows))
    assert positions.tolist() == [[i for length in row for i in range(length)] for row in rows]
    boundaries = document_boundaries(ids_of(rows)).tolist()
    ends = torch.tensor([length for row in rows for length in row]).cumsum(0).tolist()
    assert boundaries[: len(ends) + 1] == [0, *ends]
    assert set(boundaries[len(ends) :]) == {total * len(rows)}


def test_variable_length_refuses_what_it_cannot_say() -> None:
    with pytest.raises(UsageError, match="does not support ALiBi"):
        make_masks(SHAPES["alibi"], 20, "cpu", ids_of([[20]]), kernel="varlen")
