"""Distillation: the loss against its formula, the run through the train loop, reconstruction, rounded weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from piledriver import compress
from piledriver.cli.main import main
from piledriver.compress.distil import (
    DistilConfig,
    DistilSettings,
    distil,
    reconstruct,
    start_from_codes,
    write_teacher_logits,
)
from piledriver.compress.distil.loss import Distribution, DivergenceSettings, linear_distillation
from piledriver.compress.distil.objective import matching_layers
from piledriver.compress.distil.quantisation_aware import make_quantisation_aware, round_weight
from piledriver.compress.distil.recover import _write_quantised
from piledriver.compress.scheme import Scheme
from piledriver.core.config import load_config
from piledriver.core.errors import ConfigError, CorruptFileError, UsageError
from piledriver.data import StreamConfig, open_stream
from piledriver.engine import Layout
from piledriver.kernels.linear import dequantise_weight, quantise_weight, weight_codes
from piledriver.models import ModelConfig, Transformer
from piledriver.models.config import LatentAttentionConfig, MoEConfig
from piledriver.models.interchange import load_folder, read_folder_config, save_folder
from piledriver.models.presets import learning_rate
from piledriver.models.quantised import QuantisedLinear
from piledriver.optim import OptimizerConfig
from piledriver.runtime.world import detect_world
from piledriver.train import DataConfig, TrainConfig
from tests.checkpoint.processes import Started
from tests.train.corpus import make_tokens
from tests.train.runs import curve, finish, kill_when, lines_of, weights

TOKENS = torch.randint(61, (8, 24), generator=torch.Generator().manual_seed(1))


class Outputs:
    def __init__(self, logits: torch.Tensor, top_k: int | None) -> None:
        self.logits, self.top_k = logits, top_k

    def chunk(self, begin: int, end: int, temperature: float) -> Distribution:
        logits = self.logits[begin:end] / temperature
        if self.top_k is None:
            return Distribution(logits)
        best = logits.log_softmax(-1).topk(self.top_k)
        return Distribution(best.values, best.indices)


def formula(
    logits: torch.Tensor, teacher: torch.Tensor, settings: DivergenceSettings, top_k: int | None
) -> torch.Tensor:
    """The divergence of every row, straight from its definition over outcomes."""
    t = settings.temperature
    p, q = (logits / t).softmax(-1), (teacher / t).softmax(-1)
    if top_k is not None:
        ids = q.topk(top_k).indices
        kept_p, kept_q = p.gather(1, ids), q.gather(1, ids)
        rest = [1 - part.sum(-1, keepdim=True) for part in (kept_p, kept_q)]
        p, q = torch.cat((kept_p, rest[0]), 1), torch.cat((kept_q, rest[1]), 1)
    first, second = (q, p) if settings.kind == "forward" else (p, q)
    return t**2 * (first * (first.log() - second.log())).sum(-1)


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize(("temperature", "share", "softcap", "z_loss"), [(1.0, 0.0, None, 0.0), (2.0, 0.3, 3.0, 0.1)])
def test_the_chunked_loss_is_its_formula(
    kind: Any, top_k: int | None, temperature: float, share: float, softcap: float | None, z_loss: float
) -> None:
    luck = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=luck, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(23, 8, generator=luck, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(11, 23, generator=luck, dtype=torch.float64) * 2
    targets = torch.randint(23, (11,), generator=luck)
    targets[3] = -100
    settings = DivergenceSettings(kind, temperature, share)
    sums = linear_distillation(
        hidden, weight, targets, Outputs(teacher, top_k), settings, softcap=softcap, z_loss=z_loss, chunk_tokens=4
    )
    found = torch.autograd.grad(sums.total, (hidden, weight))

    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    counted = targets != -100
    entropy = F.cross_entropy(logits, targets, reduction="sum")
    wanted = (1 - share) * formula(logits, teacher, settings, top_k)[counted].sum() + share * entropy
    wanted = wanted + z_loss * logits.logsumexp(-1)[counted].square().sum()
    expected = torch.autograd.grad(wanted, (hidden, weight))
    assert int(sums.tokens) == 10
    torch.testing.assert_close(sums.total.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.cross_entropy.double(), entropy.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "dim": 32,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "mlp_dim": 64,
    "max_positions": 32,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, a student that was pruned from it, a sparse one, and token shards."""
    folder = tmp_path_factory.mktemp("distil")
    make_tokens(folder, documents=60)
    teacher = Transformer(ModelConfig(**SHAPE), seed=3)
    for parameter in teacher.parameters():
        parameter.data.mul_(8 if parameter.dim() > 1 else 1)
    save_folder(teacher, folder / "teacher")
    stream = open_stream(StreamConfig(tokens=str(folder / "tokens"), seq_len=32))
    shape = compress.SmallerShape(layers=2, mlp_dim=48, dim=24)
    save_folder(compress.prune(teacher, shape, data=stream, samples=16), folder / "student")
    save_folder(compress.prune(teacher, 0.5, data=stream, samples=16), folder / "sparse")
    return folder


def config(place: Path, out: Path, student: str = "student", steps: int = 4, **settings: Any) -> DistilConfig:
    if "teacher_logits" not in settings:
        settings.setdefault("teacher", str(place / "teacher"))
    layout = settings.pop("layout", Layout(precision="auto"))
    return DistilConfig(
        train=TrainConfig(
            model=str(place / student),
            data=DataConfig(tokens=str(place / "tokens")),
            batch_tokens=128,
            budget_tokens=128 * steps,
            out=str(out),
            optimizer=OptimizerConfig(lr=0.01),
            layout=layout,
            trackers=(),
            plots=False,
        ),
        distil=DistilSettings(**settings),
    )


def test_a_student_comes_nearer_to_its_teacher(place: Path, tmp_path: Path) -> None:
    stream = open_stream(StreamConfig(tokens=str(place / "tokens"), seq_len=32))
    tokens = torch.from_numpy(stream.read(900, 8).inputs.astype("int64"))
    teacher = load_folder(place / "teacher").eval()

    def divergence(folder: Path) -> float:
        with torch.no_grad():
            log_p, log_q = (model(tokens).log_softmax(-1) for model in (load_folder(folder), teacher))
            return float((log_q.exp() * (log_q - log_p)).sum(-1).mean())

    before = divergence(place / "student")
    for settings in ({}, {"divergence": "reverse", "top_k": 64}, {"hidden": 1.0, "cross_entropy": 0.05}):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        assert distil(config(place, out, steps=25, **settings)).finished
        assert divergence(out / "model") < before, settings
    record = load_folder(out / "model").compression
    assert [one["act"] for one in record] == ["prune", "distil"]
    assert record[-1]["tokens"] == 25 * 128


def test_hidden_states_match_the_layers_and_channels_that_stayed(place: Path) -> None:
    student, teacher = load_folder(place / "student"), load_folder(place / "teacher")
    layers, channels = matching_layers(student, teacher)
    record = student.compression[-1]
    assert layers == record["kept_layers"]
    assert channels is not None
    assert channels.tolist() == record["kept_channels"]
    assert matching_layers(Transformer(ModelConfig(**{**SHAPE, "layers": 1})), teacher) == ([2], None)
    with pytest.raises(ConfigError, match="32 channels"):
        matching_layers(Transformer(ModelConfig(**{**SHAPE, "dim": 16})), teacher)


def test_stored_outputs_teach_like_the_teacher(place: Path, tmp_path: Path) -> None:
    stream = open_stream(StreamConfig(tokens=str(place / "tokens"), seq_len=32))
    folder = write_teacher_logits(
        load_folder(place / "teacher"), stream, str(tmp_path / "logits"), windows=16, top_k=16, windows_per_shard=8
    )
    distil(config(place, tmp_path / "stored", teacher_logits=folder))
    distil(config(place, tmp_path / "live", top_k=16))
    one, other = curve(tmp_path / "stored"), curve(tmp_path / "live")
    assert list(one) == [1, 2, 3, 4]
    assert all(one[step] == pytest.approx(other[step], abs=2e-3) for step in one)
    with pytest.raises(UsageError, match="window 16"):
        distil(config(place, tmp_path / "long", steps=5, teacher_logits=folder))
    shard = Path(folder) / "00001.npy"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CorruptFileError, match="checksum"):
        distil(config(place, tmp_path / "cut", teacher_logits=folder))
    other_seed = open_stream(StreamConfig(tokens=str(place / "tokens"), seq_len=32, seed=1))
    with pytest.raises(UsageError, match="other settings"):
        write_teacher_logits(load_folder(place / "teacher"), other_seed, folder, windows=16, top_k=16)


def test_reconstruction_lowers_the_error_of_every_block_and_keeps_zeros(place: Path) -> None:
    stream = open_stream(StreamConfig(tokens=str(place / "tokens"), seq_len=32))
    teacher = load_folder(place / "teacher")
    for name in ("sparse", "student"):
        model = load_folder(place / name)
        better = reconstruct(model, teacher, stream, samples=16, epochs=6, lr=2e-3, batch_tokens=128)
        errors = better.compression[-1]["relative_error"]
        assert len(errors) == model.config.layers
        assert all(error["after"] < error["before"] for error in errors.values())
        for old, new in zip(model.blocks.parameters(), better.blocks.parameters(), strict=True):
            if old.dim() > 1 and name == "sparse":
                assert torch.equal(old == 0, new == 0)
        again = reconstruct(model, teacher, stream, samples=16, epochs=6, lr=2e-3, batch_tokens=128)
        assert all(torch.equal(a, b) for a, b in zip(better.parameters(), again.parameters(), strict=True))


def test_reconstruction_lowers_a_rate_that_harms(place: Path) -> None:
    stream = open_stream(StreamConfig(tokens=str(place / "tokens"), seq_len=32))
    teacher = load_folder(place / "teacher")
    better = reconstruct(load_folder(place / "sparse"), teacher, stream, samples=8, epochs=2, lr=0.3, batch_tokens=128)
    record = better.compression[-1]
    assert record["lr"] < 0.3
    assert any(error["after"] < error["before"] for error in record["relative_error"].values())
    # A model that is the teacher has no error to lower.
    same = reconstruct(teacher, teacher, stream, samples=4, epochs=1, batch_tokens=128)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), teacher.parameters(), strict=True))


def test_recover_reconstructs_then_distils_and_resumes(place: Path, tmp_path: Path) -> None:
    stream = open_stream(StreamConfig(tokens=str(place / "tokens"), seq_len=32))
    given: dict[str, Any] = {"out": str(tmp_path / "out"), "samples": 8, "epochs": 1, "batch_tokens": 64}
    teacher, sparse = load_folder(place / "teacher"), load_folder(place / "sparse")
    model = compress.recover(sparse, teacher, stream, tokens=128, **given)
    assert [one["act"] for one in model.compression] == ["prune", "reconstruct", "distil"]
    for name, weight in sparse.blocks.named_parameters():
        if weight.dim() > 1:
            assert torch.equal(weight == 0, dict(model.blocks.named_parameters())[name] == 0)
    again = compress.recover(sparse, teacher, stream, tokens=128, **given)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_recover_chooses_batch_rate_and_optimizer(place: Path, tmp_path: Path) -> None:
    """Small steps, Muon unless zeros must stay, a lower rate for small batches, half cross-entropy."""
    stream = open_stream(StreamConfig(tokens=str(place / "tokens"), seq_len=32))
    chosen = {}
    for name in ("sparse", "student"):
        out = str(tmp_path / name)
        compress.recover(str(place / name), str(place / "teacher"), stream, out=out, epochs=0, tokens=320)
        config = load_config(DistilConfig, f"{out}/run/distil.yaml")
        assert config.train.batch_tokens == 32
        assert config.distil.cross_entropy == 0.5
        assert config.train.schedule is not None
        assert config.train.schedule.total == 10
        assert config.train.keep_zeros == (name == "sparse")
        rate = config.train.optimizer.lr
        assert rate is not None
        assert rate < 0.1 * learning_rate(read_folder_config(place / name)[0])
        chosen[name] = config.train.optimizer.kind
    assert chosen == {"sparse": "adamw", "student": "muon"}


def test_quantisation_aware_training_starts_with_the_codes_of_gptq(place: Path) -> None:
    """Rounded to nearest, the start is what GPTQ made; its weights are as near to the dense ones as that allows."""
    dense = load_folder(place / "teacher")
    tokens = torch.randint(dense.config.vocab_size, (16, 32), generator=torch.Generator().manual_seed(0))
    small = compress.quantise(dense, "w4a16-g32", method="gptq", data=tokens)
    start = start_from_codes(dense, small)
    rounded = compress.quantise(start, "w4a16-g32")
    for name, layer in small.blocks.named_modules():
        if isinstance(layer, QuantisedLinear):
            other = rounded.blocks.get_submodule(name)
            assert isinstance(other, QuantisedLinear)
            assert torch.equal(layer.scales, other.scales)
            same = weight_codes(layer.quantised) == weight_codes(other.quantised)
            assert float(same.float().mean()) > 0.98
            old, new = (one.blocks.get_parameter(f"{name}.weight") for one in (dense, start))
            kept = weight_codes(layer.quantised) == weight_codes(quantise_weight(old, "int4", group=32))
            step = layer.scales.repeat_interleave(32, dim=1)
            assert bool(((new - old).abs() <= 0.06 * step)[kept].all())


def test_quantisation_aware_training_ends_in_the_values_it_was_trained_with(place: Path, tmp_path: Path) -> None:
    scheme = Scheme.named("w4a16-g32")
    weight = torch.randn(4, 64, requires_grad=True)
    small = round_weight(weight, scheme)
    small.square().sum().backward()
    groups = weight.detach().unflatten(1, (-1, 32)).abs()  # type: ignore[no-untyped-call]
    spans = (groups == groups.amax(dim=-1, keepdim=True)).flatten(1)
    assert int(spans.sum()) == 4 * 2  # the largest weight of a group, which scales it, stays
    torch.testing.assert_close(weight.grad, (2 * small.detach()).masked_fill(spans, 0.0))
    out = tmp_path / "run"
    assert distil(config(place, out, student="sparse", quantise="w4a16-g32")).finished
    trained, rounded = load_folder(out / "model"), load_folder(out / "quantised")
    for name in ("attention.qkv", "mlp.down"):
        value = round_weight(trained.blocks["0"].get_submodule(name).weight, scheme)
        quantised: Any = rounded.blocks["0"].get_submodule(name)
        torch.testing.assert_close(dequantise_weight(quantised.quantised, torch.float32), value, rtol=1e-6, atol=1e-7)
    make_quantisation_aware(trained, scheme)
    with torch.no_grad():
        torch.testing.assert_close(rounded(TOKENS), trained(TOKENS), rtol=1e-4, atol=1e-4)


def test_the_default_rate_of_quantisation_aware_training_is_a_fifth_of_that_of_distillation(
    place: Path, tmp_path: Path
) -> None:
    rates = []
    for number, scheme in enumerate((None, "w4a16-g32")):
        given = config(place, tmp_path / str(number), steps=1, quantise=scheme)
        run = dataclasses.replace(given.train, optimizer=OptimizerConfig())
        distil(dataclasses.replace(given, train=run))
        rates.append(load_config(DistilConfig, f"{run.out}/distil.yaml").train.optimizer.lr or 0.0)
    assert rates[0] == pytest.approx(5 * rates[1], rel=0.1)


def test_experts_stay_dense_as_they_were_trained(place: Path, tmp_path: Path) -> None:
    shape = ModelConfig(**SHAPE, qk_norm="head", moe=MoEConfig(experts=2, expert_dim=32))
    trained = Transformer(shape)
    save_folder(trained, tmp_path / "model")
    make_quantisation_aware(trained, Scheme.named("w4a16-g32"))
    _write_quantised(config(place, tmp_path, quantise="w4a16-g32"))
    written = load_folder(tmp_path / "quantised")
    with torch.no_grad():
        torch.testing.assert_close(written(TOKENS), trained(TOKENS), rtol=1e-4, atol=1e-4)
    assert written.compression[-1]["skipped"]["blocks.0.mlp.experts"] == "experts were not rounded in training"


@pytest.mark.parametrize(
    "part",
    [
        {"moe": MoEConfig(experts=2, expert_dim=32, shared_dim=32, shared_gate=True)},
        {"latent": LatentAttentionConfig(kv_rank=32, rope_dim=8, value_dim=8), "kv_heads": 4, "head_dim": 16},
    ],
)
def test_layers_that_are_rounded_in_training_are_rounded_after_it(part: dict[str, Any]) -> None:
    model = Transformer(ModelConfig(**{**SHAPE, **part}))
    skip = ["*.experts"] if "moe" in part else []
    rounded = compress.quantise(model, "w4a16-g32", skip=skip).compression[-1]["relative_error"]
    assert set(make_quantisation_aware(model, Scheme.named("w4a16-g32"))) == set(rounded)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layout": Layout(tp=1), "cross_entropy": 1.5}, "0 to 1"),
        ({"teacher_logits": "x", "teacher": "y"}, "both"),
        ({"teacher_logits": "x", "temperature": 2.0}, "neither"),
        ({"teacher": None}, "no teacher"),
    ],
)
def test_settings_that_cannot_be_are_refused(place: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(place, tmp_path, **settings)


def test_more_likely_tokens_than_the_vocabulary_has_are_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"top_k is 100000, the teacher has \d+ ids"):
        distil(config(place, tmp_path / "run", top_k=100_000))


def in_a_layout(place: Path, out: Path) -> None:
    """On two processes the teacher is sharded and the student in zero 2; GPTQ has the same bits on every rank."""
    config = load_config(DistilConfig, str(place / "distil.yaml"), [f"train.out={out}"])
    world = detect_world()
    if world.size > 1:
        train = dataclasses.replace(config.train, layout=Layout(zero=2))
        settings = dataclasses.replace(config.distil, teacher_layout=Layout(zero=3))
        config = dataclasses.replace(config, train=train, distil=settings)
    assert distil(config).finished
    stream = open_stream(StreamConfig(tokens=str(place / "tokens"), seq_len=32))
    small = compress.quantise(load_folder(place / "teacher"), "w4a16-g32", method="gptq", data=stream, samples=8)
    sums = hashlib.sha256(b"".join(value.numpy().tobytes() for value in small.state_dict().values())).hexdigest()
    (out / f"bits-{world.rank}").write_text(sums)


@pytest.mark.slow
def test_processes_and_layouts_do_not_change_the_result(place: Path, tmp_path: Path) -> None:
    from piledriver.core.config import save_config

    save_config(config(place, tmp_path), place / "distil.yaml")
    for processes, name in ((1, "one"), (2, "two")):
        out = tmp_path / name
        assert finish(Started(in_a_layout, place, out, output=tmp_path / "output.txt", processes=processes)) == 0
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert all(one[step] == pytest.approx(two[step], rel=1e-4) for step in one)
    bits = {path.read_text() for path in tmp_path.glob("*/bits-*")}
    assert len(list(tmp_path.glob("*/bits-*"))) == 3
    assert len(bits) == 1


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(place: Path, tmp_path: Path) -> None:
    from piledriver.core.config import save_config

    save_config(config(place, tmp_path / "run", steps=12), tmp_path / "distil.yaml")
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def start(out: Path) -> Started:
        words = [str(tmp_path / "distil.yaml"), "train.checkpoint_steps=3", f"train.out={out}"]
        return Started(main, ["compress", "distil", *words], output=tmp_path / "output.txt")

    assert kill_when(start(killed), lambda: lines_of(killed) >= 5)
    for out in (killed, whole):
        assert finish(start(out)) == 0
    assert curve(whole) == curve(killed)
    assert weights(whole) == weights(killed)
    said = main(["compress", "distil", str(tmp_path / "distil.yaml"), f"train.out={killed}", "distil.hidden=1"])
    assert said == 2
    assert json.loads((killed / "model" / "config.json").read_text())["compression"][-1]["act"] == "distil"
