"""Laws of the search: what fits is chosen by time, every loser has a reason with a number, bad input is one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from piledriver.cli.main import main
from piledriver.core.errors import UnknownNameError
from piledriver.engine.errors import LayoutError
from piledriver.engine.layout import Layout
from piledriver.models.presets import preset
from piledriver.plan import PlanError, Wishes, Workload, explain, parse_hardware, plan, predict
from piledriver.plan.model_config import config_of
from piledriver.plan.report.table import plan_text
from piledriver.plan.result import Plan
from piledriver.plan.search import choose
from piledriver.plan.search.choose import search_layouts, smallest_changes


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan("llama-3-8b", batch=64, hardware="8xh100-80g")


def test_the_choice_fits_and_is_the_fastest(made: Plan) -> None:
    assert made.best.fits
    assert all(made.best.time.total <= 1.016 * other.time.total for other in made.others)


def test_every_loser_has_a_reason_with_a_number(made: Plan) -> None:
    assert len(made.losers) > 100
    assert all(re.search(r"\d", loser.reason) for loser in made.losers)


def test_parts_of_time_and_memory_add_up(made: Plan) -> None:
    phase = made.best.worst.peak
    assert sum(phase.by_category().values()) == pytest.approx(phase.bytes)
    assert made.as_mapping()["time"]["step_seconds"] == pytest.approx(sum(made.as_mapping()["time"]["parts"].values()))
    assert len(made.best.worst.largest()) == 5


def test_more_sharding_takes_less_memory() -> None:
    cluster = parse_hardware("8xh100-80g")
    workload = Workload(config=preset("llama-3-8b"), length=2048, batch=8)
    sizes = [
        predict(workload, Layout(zero=zero, precision="bf16"), cluster, sequences=1).worst.allocated  # type: ignore[arg-type]
        for zero in (0, 1, 2, 3)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_recomputation_trades_time_for_memory() -> None:
    cluster = parse_hardware("1xh200")
    workload = Workload(config=preset("llama-1.2b"), length=2048, batch=8)
    made = [
        predict(workload, Layout(precision="bf16", activations=policy), cluster, sequences=8)  # type: ignore[arg-type]
        for policy in ("keep", "selective", "full")
    ]
    memory, seconds = [one.worst.allocated for one in made], [one.time.total for one in made]
    assert memory == sorted(memory, reverse=True)
    assert seconds == sorted(seconds)


def test_a_model_that_cannot_fit_says_by_how_much_and_what_would() -> None:
    with pytest.raises(PlanError) as error:
        plan("llama-3-70b", batch=1, hardware="1xrtx-4090", length=2048)
    text = str(error.value)
    assert re.search(r"[\d.]+ GiB too large|GiB of host memory", text)
    assert len(text.split("; or ")) == 3
    assert "\n" not in text


def test_the_changes_that_a_refusal_names_do_fit() -> None:
    config = preset("llama-3-8b")
    wishes = Wishes(offloads=("none",))
    with pytest.raises(PlanError) as error:
        plan(config, batch=2, hardware="2xl4", length=2048, wishes=wishes)
    found = re.search(r"(\d+)xl4-24g \(", str(error.value))
    assert found is not None
    count = int(found[1])
    assert plan(config, batch=count, hardware=f"{count}xl4", length=2048, wishes=wishes).best.fits
    with pytest.raises(PlanError):
        plan(config, batch=count, hardware=f"{count // 2}xl4", length=2048, wishes=wishes)


@pytest.mark.parametrize(("name", "nearest"), [("8xh10-80g", "h100-80g"), ("4xb2000", "b200")])
def test_an_unknown_device_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=nearest):
        parse_hardware(name)


def test_a_batch_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(PlanError, match="use 8"):
        explain("gpt2", Layout(), batch=7, hardware="8xa100-80g")


def test_a_layout_that_the_engine_would_refuse_is_refused() -> None:
    with pytest.raises(LayoutError, match="tp 3"):
        explain("llama-3-8b", Layout(tp=3), batch=3, hardware="3xh100-80g")
    with pytest.raises(LayoutError, match="does not divide the 8 experts"):
        explain("mixtral-8x7b", Layout(zero=3, ep=3), batch=3, hardware="3xh100-80g")


def test_given_micro_batches_are_kept() -> None:
    made = explain("gpt2", Layout(pp=2, microbatches=2, precision="bf16"), batch=16, hardware="2xh100-80g")
    assert (made.layout.microbatches, made.sequences) == (2, 8)


def test_a_config_file_of_a_folder_is_that_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert config_of(tmp_path / "config.json") == config_of(tmp_path)
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {tmp_path}\ndata: {{tokens: t}}\nbatch_tokens: 4096\nbudget_tokens: 4096\nout: run\n")
    assert main(["plan", str(run), "--hardware", "1xh100-80g"]) == 0
    assert f"{tmp_path.name} (0.1M parameters)" in capsys.readouterr().out
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(PlanError, match="neither a training config nor a model"):
        config_of(tmp_path / "model.json")


def test_a_million_devices_are_counted_by_kind(made: Plan) -> None:
    few, many = made.best, replace(made.best, cluster=parse_hardware("1000000xh100-80g"))
    assert many.mfu == pytest.approx(few.mfu * 8e-6)
    assert many.dollars(1e6) == pytest.approx(few.dollars(1e6) / 8e-6)


def test_a_batch_that_rules_layouts_out_is_said_with_the_nearest_that_do_not(made: Plan) -> None:
    odd = replace(made.best, workload=replace(made.best.workload, batch=60))
    assert "56 (458752 tokens) or 64 (524288 tokens) would allow all" in plan_text(replace(made, best=odd))
    assert "would allow all" not in plan_text(made)


def test_a_number_alone_names_no_device() -> None:
    with pytest.raises(PlanError, match="write it as 8xh100-80g"):
        parse_hardware("8")
    assert parse_hardware("4090").device.name == "rtx-4090-24g"


def test_scaling_loses_efficiency_but_not_throughput(made: Plan) -> None:
    curve = made.scaling()
    rates = [point["tokens_per_second"] for point in curve]
    assert rates == sorted(rates)
    assert curve[-1]["mfu"] <= curve[0]["mfu"] + 0.05


def test_hardware_files_and_mixed_clusters(tmp_path: object) -> None:
    file = tmp_path / "mine.yaml"  # type: ignore[operator]
    file.write_text("device: {like: h100-80g, memory: 40}\ncount: 4\nnetwork: ethernet-25g\n")
    cluster = parse_hardware(str(file))
    assert (cluster.count, round(cluster.smallest_memory / 2**30)) == (4, 40)
    mixed = parse_hardware("4xh100-80g+4xa100-40g")
    assert mixed.slowest.name == "a100-40g"
    assert mixed.count == len(mixed.devices()) == 8
    assert replace(mixed, count=8).name == "4xh100-80g+4xa100-40g"


def test_more_devices_that_need_a_larger_batch_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "any_fits", lambda workload, cluster, wishes: workload.batch == 4)
    workload, cluster = Workload(config=preset("gpt2"), length=256, batch=1), parse_hardware("1xh100-80g")
    assert "4xh100-80g (4 times the devices) and 4 sequences" in smallest_changes(workload, cluster, Wishes())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device: h100-80g\ncount: eight\n", "count is 'eight'"),
        ("device: {like: h100-80g, memry: 40}\n", "memry"),
        ("device: {like: h100-80g, memory: lots}\n", "memory of the device is 'lots'"),
        ("device: [\n", "is not valid YAML"),
        ("device: 8\n", "device is 8"),
        ("device: h100-80g\nnode_size: 0\n", "node_size is 0"),
    ],
)
def test_a_hardware_file_that_cannot_be_names_the_key(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises((PlanError, UnknownNameError), match=said):
        parse_hardware(str(tmp_path / "mine.yaml"))


def test_offload_on_a_cpu_makes_no_room() -> None:
    cluster = parse_hardware("here")
    if cluster.device.kind != "cpu":
        pytest.skip("this machine has a GPU")
    workload = Workload(config=preset("gpt2-124m"), length=64, batch=1)
    kept, moved = (predict(workload, Layout(offload=name), cluster, sequences=1) for name in ("none", "optimizer"))  # type: ignore[arg-type]
    assert moved.missing >= kept.missing
    assert moved.mfu <= 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--batch-tokens 100", "less than a sequence of 8192"),
        ("--explain zero=3 --micro-batch 5", "do not divide the 8 sequences"),
        ("--explain zero", "'zero' has no value"),
        ("--explain tp=2,tp=4", "'tp' is given twice"),
        ("--explain {zero", "is not a mapping"),
        ("--explain pp=2,microbatches=3", "microbatches=3 does not divide the 16 sequences"),
        ("--explain zero=3,ep=2", "the model has no experts"),
        ("--longest", "--longest is about one layout"),
        ("--picture x.txt", "is not a picture"),
        ("--picture /nowhere/x.png", "/nowhere does not exist"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "llama-3-8b", "--hardware", "8xh100-80g", *options.split()])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code in (1, 2)
    assert len(lines) == 1
    assert said in lines[0]
    assert "Fix: " in lines[0]


def test_the_layout_of_a_report_can_be_explained() -> None:
    from piledriver.cli.plan import _layout_fields

    printed = {"zero": 3, "precision": "bf16", "recompute_norms": True, "stage_blocks": [10, 2]}
    assert _layout_fields(str(printed)) == printed
    assert _layout_fields("Layout(zero=3, tp=2, stage_blocks=[3,5])") == {"zero": 3, "tp": 2, "stage_blocks": [3, 5]}


def test_a_faster_layout_that_lost_was_less_simple() -> None:
    workload = Workload(config=preset("llama-3.2-1b"), length=8192, batch=64)
    found = search_layouts(workload, parse_hardware("8xh100-80g"), Wishes(data_parallel_only=True))
    best = found.fitting[0].time.total
    for one, loser in zip(found.fitting[1:40], found.losers(40), strict=False):
        assert ("less simple" in loser.reason) == (one.time.total < best)
        assert "-" not in loser.reason.split("%")[0]
