"""Both bridges: any nn.Module as a pure function, any functional module as an nn.Module, on the same tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piledriver.functional as F
from piledriver.functional.errors import (
    MissingCollectionError,
    MissingKeyError,
    MissingVariableError,
    ParameterShapeError,
    TransformError,
)

TOKENS = F.randint(F.key(0), (2, 5), 0, 19)


def decoder(**changes: object) -> F.Decoder:
    return F.Decoder(vocab_size=19, dim=8, depth=2, heads=2, mlp_dim=12, **changes)  # type: ignore[arg-type]


def a_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def test_a_torch_module_becomes_a_pure_function() -> None:
    net, x = a_net(), F.normal(F.key(0), (6, 3))
    module = F.from_torch(net)
    variables = module.init(F.key(0), x)
    assert variables.at("params.0.weight").data_ptr() == net[0].weight.data_ptr()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    out, updated = module.apply(variables, x, mutable=["buffers"])
    again, _ = module.apply(variables, x, mutable=["buffers"])
    assert out.equal(again)
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    expected = net(x)
    assert out.equal(expected)
    assert updated.at("buffers.1.running_mean").equal(net[1].running_mean)
    grads = F.grad(lambda p: module.apply(variables.set("params", p), x).square().sum())(variables["params"])
    expected.square().sum().backward()
    torch.testing.assert_close(grads["0"]["weight"], net[0].weight.grad)
    with pytest.raises(MissingCollectionError, match="buffers"):
        module.apply({"params": variables["params"]}, x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 4)
        self.head = nn.Linear(4, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens))
        return out


def test_tied_weights_of_a_torch_module_stay_tied() -> None:
    net = Tied()
    module = F.from_torch(net)
    variables = module.init(F.key(0), TOKENS)
    assert list(F.flatten(variables)) == [("params", "embed", "weight")]
    grads = F.grad(lambda v: module.apply(v, TOKENS).square().sum())(variables)
    net(TOKENS).square().sum().backward()
    torch.testing.assert_close(grads.at("params.embed.weight"), net.embed.weight.grad)


def test_what_a_torch_module_lacks_is_never_its_own_value() -> None:
    module, x = F.from_torch(a_net()), torch.ones(2, 3)
    variables = module.init(F.key(0), x)
    with pytest.raises(MissingVariableError, match=r"no '0\.bias' in collection 'params'"):
        module.apply(variables.without("params.0.bias"), x)
    with pytest.raises(ParameterShapeError, match=r"'0\.bias' is stored as \(7,\), but \(4,\)"):
        module.apply(variables.set("params.0.bias", torch.ones(7)), x)
    with pytest.raises(TransformError, match="from_torch of a function"):
        F.from_torch(lambda x: x)  # type: ignore[arg-type]


def named(name: str) -> F.Module:
    class Named(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            return self.child(name, F.Dense(2))(x)

    return Named()


def test_names_of_children_may_be_any_that_torch_modules_have_not() -> None:
    x = torch.ones(1, 3)
    for name in ("collections", "streams", "mutable", "names"):
        net = F.to_torch(named(name), named(name).init(F.key(0), x))
        assert list(net.state_dict()) == [f"{name}.bias", f"{name}.kernel"]
        assert net(x).shape == (1, 2)
    for name in ("training", "forward", "to", "functional"):
        with pytest.raises(TransformError, match=f"'{name}' is a name of every torch module"):
            F.to_torch(named(name), named(name).init(F.key(0), x))


def test_a_torch_module_says_what_it_was_not_made_with() -> None:
    class Noisy(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            self.sow("seen", "x", x)
            return self.child("drop", F.Dropout(0.5))(self.child("up", F.Dense(2))(x), deterministic=False)

    x = torch.ones(1, 3)
    variables = Noisy().init(F.key(0), x)
    with pytest.raises(TransformError, match="no collection 'seen' to write back to"):
        F.to_torch(Noisy(), variables, mutable=("seen",))
    with pytest.raises(MissingKeyError) as caught:
        F.to_torch(Noisy(), variables)(x)
    assert any("streams=" in note for note in caught.value.__notes__)


def test_a_torch_module_inside_a_functional_one() -> None:
    linear = nn.Linear(4, 4)

    class Mixed(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            return self.child("theirs", F.from_torch(linear))(self.child("ours", F.Dense(4))(x))

    x = torch.ones(2, 3)
    variables = Mixed().init(F.key(0), x)
    assert list(F.flatten(variables["params"])) == [
        ("ours", "bias"),
        ("ours", "kernel"),
        ("theirs", "bias"),
        ("theirs", "weight"),
    ]
    params = variables["params"]
    expected = linear(x @ params["ours"]["kernel"] + params["ours"]["bias"])
    torch.testing.assert_close(Mixed().apply(variables, x), expected)


def test_per_example_gradients_of_a_torch_module() -> None:
    net, x = nn.Linear(3, 1), F.normal(F.key(0), (5, 3))
    module = F.from_torch(net)
    variables = module.variables()
    grads = F.vmap(F.grad(lambda v, row: module.apply(v, row).sum()), in_axes=(None, 0))(variables, x)
    torch.testing.assert_close(grads["params"]["weight"][:, 0], x)


@pytest.mark.parametrize("changes", [{}, {"scan": True}, {"remat": True}])
def test_a_functional_module_becomes_a_torch_one(changes: dict[str, bool]) -> None:
    model = decoder(**changes)
    variables = model.init(F.key(0), TOKENS)
    net = F.to_torch(model, variables)
    assert dict(net.named_parameters()).keys() == {".".join(path) for path in F.flatten(variables["params"])}
    assert net.get_parameter("norm.scale").data_ptr() == variables.at("params.norm.scale").data_ptr()
    out = net(TOKENS)
    torch.testing.assert_close(out, model.apply(variables, TOKENS))
    out.square().mean().backward()
    grads = F.grad(lambda p: model.apply({"params": p}, TOKENS).square().mean())(variables["params"])
    for path, gradient in F.flatten(grads).items():
        torch.testing.assert_close(net.get_parameter(".".join(path)).grad, gradient)


def test_the_torch_module_trains_saves_and_comes_back() -> None:
    model = decoder()
    net = F.to_torch(model, model.init(F.key(0), TOKENS))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    first = None
    for _ in range(5):
        loss = F.cross_entropy(net(TOKENS[:, :-1]), TOKENS[:, 1:])
        first = first or loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < first
    other = F.to_torch(model, model.init(F.key(1), TOKENS))
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other(TOKENS), net(TOKENS))
    torch.testing.assert_close(model.apply(net.variables(), TOKENS), net(TOKENS).detach())


def test_every_functional_module_is_a_node_with_hooks() -> None:
    model = decoder()
    net = F.to_torch(model, model.init(F.key(0), TOKENS))
    seen = []
    for name, node in net.named_modules():
        node.register_forward_hook(lambda *_, name=name: seen.append(name))
    net(TOKENS)
    assert {"", "embed", "layers_0", "layers_1.mlp.gate", "layers_1.attention.query", "norm"} <= set(seen)
    doubled = net.layers_1.register_forward_hook(lambda _node, _args, out: out * 2)
    changed = net(TOKENS)
    doubled.remove()
    assert not changed.equal(net(TOKENS))


def test_buffers_keys_and_modes() -> None:
    class Net(F.Module):
        def __call__(self, x: Tensor, train: bool) -> Tensor:
            x = self.child("norm", F.BatchNorm())(x, use_running_average=not train)
            return self.child("drop", F.Dropout(0.5))(x, deterministic=not train)

    x = F.normal(F.key(0), (8, 3)) + 1
    variables = Net().init(F.key(0), x, False)
    net = F.to_torch(Net(), F.tree_map(torch.clone, variables), streams=("dropout",), mutable=("batch_stats",))
    assert dict(net.named_buffers()).keys() == {"norm.mean", "norm.var"}
    torch.manual_seed(0)
    first = net(x, True)
    torch.testing.assert_close(net.get_buffer("norm.mean"), 0.01 * x.mean(0))
    torch.manual_seed(0)
    assert net(x, True).equal(first)
    assert not net(x, True).equal(first)
    net.eval()
    before = net.get_buffer("norm.mean").clone()
    net(x, False)
    assert net.get_buffer("norm.mean").equal(before)


def test_the_torch_module_compiles() -> None:
    model = decoder()
    net = F.to_torch(model, model.init(F.key(0), TOKENS))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS), net(TOKENS))


def test_to_torch_needs_parameters() -> None:
    with pytest.raises(TransformError, match="'params'"):
        F.to_torch(F.Dense(2), {})
