"""Accelerate's paths and names are there, and its shared states behave as its users expect."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

NAMES = {
    "": "Accelerator PartialState ParallelismConfig debug_launcher notebook_launcher skip_first_batches LocalSGD "
    "DataLoaderConfiguration DistributedType init_empty_weights dispatch_model load_checkpoint_and_dispatch "
    "find_executable_batch_size synchronize_rng_states GradScalerKwargs InitProcessGroupKwargs ProfileKwargs",
    "utils": "set_seed gather gather_object broadcast broadcast_object_list reduce pad_across_processes send_to_device "
    "recursively_apply find_batch_size concatenate release_memory ProjectConfiguration GradientAccumulationPlugin "
    "LoggerType patch_environment is_bf16_available extract_model_from_parallel compile_regions tqdm "
    "compute_module_sizes find_tied_parameters OffloadedWeightsLoader write_basic_config DeepSpeedPlugin",
    "state": "PartialState AcceleratorState GradientState is_initialized",
    "data_loader": "prepare_data_loader DataLoaderShard DataLoaderDispatcher BatchSamplerShard IterableDatasetShard "
    "SeedableRandomSampler SkipBatchSampler SkipDataLoader skip_first_batches",
    "optimizer": "AcceleratedOptimizer",
    "scheduler": "AcceleratedScheduler",
    "tracking": "GeneralTracker TensorBoardTracker WandBTracker register_tracker_class LOGGER_TYPE_TO_CLASS",
    "logging": "get_logger MultiProcessAdapter",
    "big_modeling": "cpu_offload disk_offload init_on_device",
    "hooks": "ModelHook SequentialHook AlignDevicesHook CpuOffload UserCpuOffloadHook add_hook_to_module",
    "launchers": "debug_launcher notebook_launcher",
    "checkpointing": "save_accelerator_state load_accelerator_state save_custom_state load_custom_state",
    "utils.operations": "honor_type is_namedtuple DistributedOperationException",
    "utils.modeling": "set_module_tensor_to_device infer_auto_device_map load_checkpoint_in_model align_module_device",
    "utils.memory": "clear_device_cache find_executable_batch_size",
}


@pytest.fixture(autouse=True)
def _fresh_states() -> Any:
    from piledriver.compat.accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize("path", NAMES)
def test_names_are_where_users_import_them_from(path: str) -> None:
    module = importlib.import_module("piledriver.compat.accelerate" + (f".{path}" if path else ""))
    missing = [name for name in NAMES[path].split() if not hasattr(module, name)]
    assert not missing


def test_the_alias_shares_modules() -> None:
    code = (
        "from piledriver.runtime.launch.alias import install_alias\n"
        "install_alias('accelerate', 'piledriver.compat.accelerate')\n"
        "import accelerate.utils.operations, piledriver.compat.accelerate.utils.operations as ours\n"
        "assert accelerate.utils.operations is ours and ours.__spec__.name.startswith('piledriver')\n"
        "from accelerate.state import PartialState as a\n"
        "from piledriver.compat.accelerate.state import PartialState as b\n"
        "assert a is b\n"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)


def test_states_are_shared_and_say_when_they_were_reset() -> None:
    from piledriver.compat.accelerate import Accelerator, PartialState
    from piledriver.compat.accelerate.state import AcceleratorState, GradientState

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert GradientState().num_steps == 3
    assert AcceleratorState().mixed_precision == "no"
    with pytest.raises(ValueError, match="already been initialized"):
        Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)
    with pytest.raises(AttributeError, match=r"This happens if `AcceleratorState._reset_state\(\)`"):
        _ = accelerator.num_processes
    assert PartialState(cpu=True).num_processes == 1


def test_a_loop_of_theirs(tmp_path: Path) -> None:
    from piledriver.compat.accelerate import Accelerator
    from piledriver.compat.accelerate.utils import ProjectConfiguration, set_seed

    set_seed(3)
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader([(torch.tensor([float(i)]), torch.tensor([2.0 * i])) for i in range(8)], batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(30):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    assert model.weight.item() == pytest.approx(2.0, abs=0.2)
    accelerator.save_state()
    accelerator.load_state()
    accelerator.save_model(model, tmp_path / "weights")
    assert (tmp_path / "weights" / "model.safetensors").is_file()


def test_nested_structures_keep_their_types() -> None:
    from piledriver.compat.accelerate.utils import recursively_apply, send_to_device

    pair = namedtuple("pair", "a b")
    moved = send_to_device(pair(torch.ones(1), [torch.ones(1), "x"]), "meta")
    assert isinstance(moved, pair)
    assert moved.b[0].device.type == "meta"
    with pytest.raises(TypeError, match="Unsupported types"):
        recursively_apply(torch.abs, [1], error_on_other_type=True)


def test_a_loss_repeated_to_the_batch_size_counts_each_sample_once() -> None:
    from piledriver.compat.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=4))
    assert [len(accelerator.gather_for_metrics(torch.ones(4))) for _ in loader] == [4, 4, 2]
    assert [len(accelerator.gather_for_metrics(list("abcd"))) for _ in loader] == [4, 4, 2]
    even = accelerator.prepare(DataLoader(range(8), batch_size=4))
    assert [len(accelerator.gather_for_metrics(torch.ones(6))) for _ in even] == [6, 6]
