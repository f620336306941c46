"""Launching: scripts, configs, restarts after a kill, cells of a notebook, two nodes."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piledriver.cli import config as config_verb
from piledriver.cli import launch as launch_verb
from piledriver.cli.main import main
from piledriver.core.errors import UsageError
from piledriver.runtime.connection import resolve_host
from piledriver.runtime.errors import LaunchError, RendezvousError
from piledriver.runtime.hardware import Hardware
from piledriver.runtime.launch.agent import _failure, launch, worker_environment
from piledriver.runtime.launch.config import LaunchConfig, processes_per_node, resolve_launch_config
from piledriver.runtime.launch.slurm import slurm_script
from tests.patience import HANG_S

TRAIN = Path(__file__).with_name("train_script.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of two processes on this machine that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed")
    launch(LaunchConfig(nproc=2, cpu=True), str(TRAIN), [str(out)])
    weights: dict[str, torch.Tensor] = torch.load(out / "final.pt")
    return weights


def _parsed(module: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.configure(parser)
    return parser.parse_args(words)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("nproc: 3\nmax_restarts: 2\n")
    args = _parsed(launch_verb, "--nproc", "5", "train.py", "--nproc", "7")
    wanted, source = resolve_launch_config(str(file), launch_verb.chosen_flags(args))
    assert (wanted.nproc, wanted.max_restarts, wanted.cpu, source) == (5, 2, False, str(file))
    assert args.script_args == ["--nproc", "7"]


def test_accelerates_spellings_and_its_config_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\n"
        "machine_rank: 1\nmain_process_ip: node0\nmain_process_port: 29400\nnum_processes: 8\nuse_cpu: false\n"
        "downcast_bf16: 'no'\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_offload_params: true\n"
        "dynamo_config:\n  dynamo_backend: INDUCTOR\n"
    )
    words = (
        "--config_file",
        str(file),
        "--num-processes",
        "4",
        "--gpu_ids",
        "0,1",
        "--gradient_accumulation_steps",
        "3",
    )
    args = _parsed(launch_verb, *words, "--env", "A=b", "train.py", "--num_processes", "7")
    wanted, _ = resolve_launch_config(
        args.config, launch_verb.chosen_flags(args), launch_verb.given_accelerate_flags(args)
    )
    assert (wanted.nproc, wanted.nnodes, wanted.node_rank, wanted.rdzv_endpoint) == (2, "2", 1, "node0:29400")
    assert (wanted.mixed_precision, wanted.gradient_accumulation_steps) == ("bf16", 3)
    assert worker_environment(wanted, 2, 4) == {
        "PILEDRIVER_MIXED_PRECISION": "bf16",
        "PILEDRIVER_GRADIENT_ACCUMULATION_STEPS": "3",
        **({} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "2"}),
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
        "FSDP_OFFLOAD_PARAMS": "true",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "A": "b",
    }
    assert args.script_args == ["--num_processes", "7"]
    assert main(["launch", "--use_deepspeed", "--num_processes", "2", "train.py"]) == 2
    assert "Layout(zero=" in capsys.readouterr().err
    assert main(["launch", "--num_processes", "3", "--num_machines", "2", "train.py"]) == 2
    file.write_text("distributed_type: 'NO'\nmixed_precision: no\n")
    assert resolve_launch_config(str(file), {})[0] == LaunchConfig(mixed_precision="no")


def test_config_asks_and_writes_what_launch_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sub" / "launch.yaml"
    answers = iter(["2", "1", "10.0.0.1:29400", "many", "4", "no", "bf16", "3"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    config_verb.run(_parsed(config_verb, "--file", str(file)))
    wanted, _ = resolve_launch_config(str(file), {})
    assert wanted == LaunchConfig(
        nnodes="2", node_rank=1, rdzv_endpoint="10.0.0.1:29400", nproc=4, mixed_precision="bf16", max_restarts=3
    )


def test_config_without_asking(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    config_verb.run(_parsed(config_verb, "--file", str(file), "--default", "--cpu"))
    assert resolve_launch_config(str(file), {})[0] == LaunchConfig(cpu=True)


@pytest.mark.parametrize(
    "wrong", [{"nproc": 0}, {"nnodes": "two"}, {"nnodes": "2"}, {"nnodes": "3:2"}, {"max_restarts": -1}]
)
def test_configs_that_cannot_be_meant(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"Fix:"):
        LaunchConfig(**wrong)


def test_processes_follow_the_hardware() -> None:
    assert processes_per_node(LaunchConfig(), Hardware(cuda=8))[0] == 8
    assert processes_per_node(LaunchConfig(cpu=True), Hardware(cuda=8))[0] == 1
    told = worker_environment(LaunchConfig(cpu=True, mixed_precision="bf16"), 2, 8)
    assert told["PILEDRIVER_DEVICE"] == "cpu"


def test_slurm_script_is_shell() -> None:
    text = slurm_script(LaunchConfig(nproc=4), "train.py", ["--name", "it's"], nodes=2)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_slurm_script_needs_no_meeting_place_and_loses_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nnodes", "4", "--alias-accelerate", "--mixed-precision", "bf16", "--log-dir", "logs"]
    assert main(["launch", "--slurm", *flags, "-m", "my.module", "--lr", "1"]) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --nodes=4" in said
    assert "--alias-accelerate --log-dir logs --mixed-precision bf16 -m my.module --lr 1'" in said


def test_the_config_is_shown_without_a_script_and_nobody_is_asked_in_vain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["launch", "--config", str(tmp_path / "absent"), "--print-config"]) == 1
    (tmp_path / "launch.yaml").write_text("nproc: 3\n")
    assert main(["launch", "--config", str(tmp_path / "launch.yaml"), "--print-config"]) == 0
    assert "nproc: 3" in capsys.readouterr().out
    assert main(["launch"]) == 2
    assert "no script" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["config", "--file", str(tmp_path / "new.yaml")]) == 2
    assert "--default" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failing_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('no data here')\n")
    with pytest.raises(LaunchError, match=r"rank 1 failed \(exit code 1\): ValueError: no data here"):
        launch(LaunchConfig(nproc=2, cpu=True), str(script))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_being_asked_to_stop_is_said_once_and_not_by_every_process(
    tmp_path: Path, number: signal.Signals, code: int, word: str
) -> None:
    (tmp_path / "waits.py").write_text("import pathlib, time\npathlib.Path('here').touch()\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "piledriver.cli.main", "launch", "--cpu", "--nproc", "1", "waits.py"]
    options = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    # A suite that runs in the background has the signal ignored, and children inherit that.
    with subprocess.Popen(
        command, **options, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    ) as process:
        while not (tmp_path / "here").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, number)
        _, said = process.communicate()
    assert process.returncode == code
    assert word in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_alias_runs_a_script_that_imports_accelerate(tmp_path: Path) -> None:
    script = tmp_path / "uses_accelerate.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import accelerate
            from accelerate.utils import gather_object, set_seed
            from accelerate import Accelerator
            accelerator = Accelerator()
            import importlib.metadata, importlib.util
            assert importlib.metadata.version("accelerate") == accelerate.__version__
            assert "accelerate" in importlib.metadata.packages_distributions()
            assert importlib.util.find_spec("accelerate") is not None
            found = gather_object([accelerator.process_index])
            if accelerator.is_main_process:
                open({str(tmp_path / "out")!r}, "w").write(f"{{accelerate.__name__}} {{found}}")
            accelerator.end_training()
            """
        )
    )
    launch(LaunchConfig(nproc=2, cpu=True, alias_accelerate=True), str(script))
    assert (tmp_path / "out").read_text() == "piledriver.compat.accelerate [0, 1]"


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_the_weights_are_those_of_an_undisturbed_run(
    undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    launch(LaunchConfig(nproc=2, cpu=True, max_restarts=1), str(TRAIN), [str(killed), "--kill-rank", "1"])
    got = torch.load(killed / "final.pt")
    assert json.loads((killed / "attempts.json").read_text()) == [0, 4], "it must have gone on from step 4"
    assert all(torch.equal(undisturbed[key], got[key]) for key in undisturbed)


NOTEBOOK = """
import torch
from piledriver.runtime.launch.function import notebook_launcher
def train(factor):
    from piledriver.runtime import detect_world, connect
    from piledriver.runtime.collectives.operations import reduce
    world = detect_world(); connect(world)
    layer = torch.nn.Linear(2, 1); layer(torch.ones(1, 2)).sum().backward()
    total = reduce(world, torch.tensor([float(factor)]), "sum").item()
    assert total == factor * world.size
    if factor < 0 and world.rank == 1: raise ZeroDivisionError("in the cell of rank 1")
"""


@pytest.mark.slow
def test_cells_of_a_real_kernel() -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    import nbformat

    cells = [NOTEBOOK, "notebook_launcher(train, (3,), num_processes=2)\nprint('fine')"]
    cells += [
        "try:\n    notebook_launcher(train, (-1,), num_processes=2)\nexcept ZeroDivisionError as e:\n    print(e)"
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbclient.NotebookClient(notebook, timeout=int(HANG_S), kernel_name="python3").execute()
    printed = [
        "".join(out.get("text", "") for out in cell.outputs if out.get("name") == "stdout") for cell in notebook.cells
    ]
    assert printed[1:] == ["fine\n", "in the cell of rank 1\n"]


def _can_make_namespaces() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    probe = f"pd-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", probe], check=False)
    return made


@pytest.fixture
def two_nodes() -> Any:
    """Two network namespaces joined by a pair of virtual interfaces; another test process may have two of its own."""
    if not _can_make_namespaces():
        pytest.skip("network namespaces are not permitted here")
    names = [f"pd-node{i}-{os.getpid()}" for i in range(2)]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add pdv0 netns {names[0]} type veth peer name pdv1 netns {names[1]}"]
    for i, name in enumerate(names):
        commands += [
            f"ip -n {name} addr add 10.77.0.{i + 1}/24 dev pdv{i}",
            f"ip -n {name} link set pdv{i} up",
            f"ip -n {name} link set lo up",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _on_node(name: str, rank: int, out: Path, *extra: str) -> subprocess.Popen[str]:
    code = (
        "from piledriver.runtime.launch.agent import launch; "
        "from piledriver.runtime.launch.config import LaunchConfig; "
        f"launch(LaunchConfig(nproc=1, cpu=True, nnodes='2', node_rank={rank}, rdzv_endpoint='10.77.0.1:29499'), "
        f"{str(TRAIN)!r}, {[str(out), *extra]!r})"
    )
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": f"pdv{rank}"}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-c", code],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
def test_two_nodes_train_together_and_a_cut_link_is_an_error_within_the_timeout(
    two_nodes: list[str], undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    both = tmp_path / "both"
    nodes = [
        _on_node(name, rank, both, "--timeout-seconds", "5", "--wait-for-cut", str(rank))
        for rank, name in enumerate(two_nodes)
    ]
    ready = [both / f"ready-{rank}" for rank in range(2)]
    while not all(file.exists() for file in ready):
        assert all(node.poll() is None for node in nodes), "both must live until the link is cut"
        time.sleep(0.2)
    got = torch.load(both / "final.pt")
    assert all(torch.equal(undisturbed[key], got[key]) for key in undisturbed)
    subprocess.run(["ip", "-n", two_nodes[1], "link", "set", "pdv1", "down"], check=True)
    (both / "go").write_text("")
    said = [node.communicate(timeout=HANG_S)[0] for node in nodes]
    assert all(node.returncode != 0 for node in nodes)
    assert any("another process is gone or cannot be reached" in text for text in said), said


@pytest.mark.parametrize(
    ("code", "message", "log_dir", "said", "fix"),
    [
        (1, {"message": "ValueError: no data"}, None, r"\(exit code 1\): ValueError: no data", "traceback is above"),
        (1, {"message": "LayoutError: tp is 3. Fix: use tp=2"}, None, r"tp is 3\. Fix: use tp=2;", "traceback"),
        (3, "To enable traceback see: https://...", None, r"\(exit code 3\)\.", "without a Python exception"),
        (-9, "Signal 9 (SIGKILL) received", None, r"\(killed by SIGKILL\)\.", "memory of the machine"),
        (-9, "Signal 9 (SIGKILL) received", "logs", r"\(killed by SIGKILL\)\.", "read logs"),
    ],
)
def test_a_failure_names_a_traceback_only_where_there_is_one(
    code: int, message: Any, log_dir: str | None, said: str, fix: str
) -> None:
    first = SimpleNamespace(exitcode=code, message=message, signal_name=lambda: "SIGKILL")
    error = _failure(SimpleNamespace(get_first_failure=lambda: (0, first)), LaunchConfig(log_dir=log_dir))
    assert re.search(said, str(error))
    assert error.fix is not None
    assert fix in error.fix


def test_a_host_that_cannot_be_resolved_is_one_line() -> None:
    with pytest.raises(RendezvousError, match=r"the host 'no\.such\.host\.invalid' cannot be resolved"):
        resolve_host("no.such.host.invalid", 0.0)
    resolve_host("localhost", 0.0)
