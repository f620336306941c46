"""From environment to world: every launcher, every wrong environment, and a reason for each decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.runtime.collectives.split import shard_bounds, shard_inputs
from piledriver.runtime.environment import parse_bool, patched
from piledriver.runtime.errors import MissingDeviceError, WorldError
from piledriver.runtime.hardware import Hardware
from piledriver.runtime.launch.numa import near_cores
from piledriver.runtime.world import World, detect_world

CPU = Hardware(cores=4)
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "node0",
}


@pytest.mark.parametrize(
    ("environ", "launcher", "address"),
    [(TORCHRUN, "torchrun", "node0"), (SLURM, "slurm", "gpu03"), (OPENMPI, "openmpi", "node0")],
)
def test_each_launcher_names_the_same_place(environ: dict[str, str], launcher: str, address: str) -> None:
    world = detect_world(environ, Hardware(cuda=4))
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node) == (5, 8, 1, 4, 1)
    assert (world.launcher, world.address) == (launcher, address)
    assert str(world.device) == "cuda:1"
    assert world.backend == "cpu:gloo,cuda:nccl"
    assert {what for what, _, _ in world.reasons} == {
        "launcher",
        "rank",
        "local rank",
        "device",
        "backend",
        "rendezvous",
    }
    assert all(why for _, _, why in world.reasons)


def test_without_a_launcher() -> None:
    world = detect_world({}, CPU)
    assert (world.rank, world.size, world.device.type, world.backend) == (0, 1, "cpu", None)
    assert "no launcher" in world.explain()


def test_a_slurm_batch_script_is_not_one_of_many() -> None:
    # sbatch sets SLURM_PROCID too; only srun makes tasks.
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert detect_world(environ, CPU).size == 1


def test_a_scheduler_that_shows_one_gpu_per_task() -> None:
    assert str(detect_world(SLURM, Hardware(cuda=1)).device) == "cuda:0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'"),
        ({"RANK": "8"}, "rank 8 is not below the world size 8"),
        ({"WORLD_SIZE": ""}, "RANK=5 is set but WORLD_SIZE is not"),
        ({"LOCAL_RANK": "4"}, "local rank 4 is not below LOCAL_WORLD_SIZE 4"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "world size is 0"),
    ],
)
def test_wrong_environments(changes: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message) as caught:
        detect_world({**TORCHRUN, **changes}, CPU)
    assert "Fix:" in str(caught.value)


def test_mpi_on_several_nodes_needs_an_address() -> None:
    with pytest.raises(WorldError, match="MASTER_ADDR"):
        detect_world({name: value for name, value in OPENMPI.items() if name != "MASTER_ADDR"}, CPU)


def test_missing_gpus() -> None:
    with pytest.raises(MissingDeviceError, match="local rank 1 has no cuda device: this node has 1"):
        detect_world(TORCHRUN, Hardware(cuda=1))
    with pytest.raises(MissingDeviceError, match="device cuda was requested, but"):
        detect_world({}, CPU, device="cuda")


def test_wishes_win_in_order() -> None:
    gpu = Hardware(cuda=8)
    assert detect_world({"PILEDRIVER_DEVICE": "cpu"}, gpu).device.type == "cpu"
    assert detect_world({"ACCELERATE_USE_CPU": "yes"}, gpu).device.type == "cpu"
    assert detect_world({"ACCELERATE_TORCH_DEVICE": "cuda:3"}, gpu).device.index == 3
    assert detect_world({"PILEDRIVER_DEVICE": "cpu"}, gpu, device="cuda").device.type == "cuda"


def test_mps_cannot_talk_to_others() -> None:
    world = detect_world(TORCHRUN, Hardware(mps=1))
    assert world.device.type == "cpu"
    assert "MPS has no distributed backend" in world.explain()


def test_reading_switches() -> None:
    with pytest.raises(WorldError, match="'maybe'"):
        parse_bool("maybe", "X")


def test_patched_environment_comes_back_after_an_error() -> None:
    with patched(pd_outer="1"):
        with pytest.raises(RuntimeError), patched(pd_outer="2", pd_inner="3"):
            raise RuntimeError
        assert detect_world({}, CPU).size == 1


@given(st.integers(0, 200), st.integers(1, 17))
def test_shares_are_a_partition(length: int, size: int) -> None:
    items = list(range(length))
    shares = [shard_inputs(items, rank, size) for rank in range(size)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 60), st.integers(1, 9))
def test_padded_shares_are_equal_and_begin_with_the_real_ones(length: int, size: int) -> None:
    items = list(range(length))
    for rank in range(size):
        share = shard_inputs(items, rank, size, apply_padding=True)
        start, end = shard_bounds(length, rank, size)
        assert len(share) == -(-length // size)
        assert share[: end - start] == items[start:end]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 8))
def test_every_core_is_given_once_where_there_are_enough(processes: int, nodes: int, cores_each: int) -> None:
    layout = [list(range(node * cores_each, (node + 1) * cores_each)) for node in range(nodes)]
    allowed = [core for node in layout for core in node]
    given = [
        near_cores(World(rank=r, size=processes, local_rank=r, local_size=processes), allowed, layout, None)
        for r in range(processes)
    ]
    assert all(given)
    if len(allowed) >= processes:
        assert sorted(core for part in given for core in part) == allowed
