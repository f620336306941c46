"""A model whose weights are on several devices, on the CPU or on disk computes what it computed in one place."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from piledriver.engine.offload.disk.errors import DiskError, DiskFullError
from piledriver.serve.placement import (
    PlacementError,
    StrictLoadError,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from piledriver.serve.placement.hooks import remove_hook_from_submodules
from piledriver.serve.placement.layerwise_casting import attach_layerwise_casting_hooks
from piledriver.serve.placement.load_checkpoint import get_state_dict_offloaded_model

INPUT = torch.linspace(-1, 1, 6).reshape(2, 3)


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return make()


def test_weights_on_the_cpu_or_on_disk(model: nn.Sequential, tmp_path: Path) -> None:
    expected, before = model(INPUT), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for offload in (lambda: cpu_offload(model, "cpu"), lambda: disk_offload(model, tmp_path / "disk", "cpu")):
        offload()
        assert all(parameter.is_meta for parameter in model.parameters())
        torch.testing.assert_close(model(INPUT), expected)
        assert all(parameter.is_meta for parameter in model.parameters())
        torch.testing.assert_close(get_state_dict_offloaded_model(model), before)
        remove_hook_from_submodules(model)
        torch.testing.assert_close(dict(model.state_dict()), before)


def test_a_device_map_with_parts_on_disk(model: nn.Sequential, tmp_path: Path) -> None:
    expected = model(INPUT)
    with pytest.raises(PlacementError, match="offload_dir"):
        dispatch_model(make(), {"0": "cpu", "1": "cpu", "2": "disk"})
    with pytest.raises(PlacementError, match=r"no device for 2\.weight, 2\.bias"):
        dispatch_model(make(), {"0": "cpu", "1": "cpu"})
    placed = dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir=tmp_path)
    assert placed[2].weight.is_meta
    assert not placed[0].weight.is_meta
    torch.testing.assert_close(placed(INPUT), expected)


def test_a_checkpoint_goes_into_an_empty_model(model: nn.Sequential, tmp_path: Path) -> None:
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = make()
    assert all(parameter.is_meta for parameter in empty.parameters())
    placed = load_checkpoint_and_dispatch(
        empty, tmp_path, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_folder=tmp_path
    )
    torch.testing.assert_close(placed(INPUT), model(INPUT))
    with pytest.raises(StrictLoadError, match="lacks"):
        load_checkpoint_in_model(nn.Sequential(*make(), nn.Linear(2, 2)), tmp_path, strict=True)
    with pytest.raises(PlacementError, match="no checkpoint"):
        load_checkpoint_in_model(model, tmp_path / "absent")


def test_devices_are_filled_in_order() -> None:
    # 64 bytes of the first layer, 40 of the last; the first device keeps room for the largest layer.
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert infer_auto_device_map(model, {0: 150, "cpu": 10**6}) == {"": 0}
    assert infer_auto_device_map(model, {0: 60, "cpu": 10**6}) == {"": "cpu"}
    assert infer_auto_device_map(nn.Sequential(*model, nn.Linear(2, 4)), {0: 120, 1: 60, "cpu": 60}) == {
        "0": 0,
        "1": 0,
        "2": 1,
        "3": "cpu",
    }
    with pytest.raises(PlacementError, match="unknown device 'gpu'"):
        infer_auto_device_map(model, {"gpu": 1})


def test_tied_weights_stay_on_one_device() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    model[2].weight = model[0].weight
    assert infer_auto_device_map(model, {0: 190, "cpu": 10**6}) == {"0": 0, "2": 0, "1": "cpu", "3": "cpu"}


def test_models_of_a_pipeline_take_turns(model: nn.Sequential) -> None:
    first, hook = cpu_offload_with_hook(model, "cpu")
    second, _ = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    assert second(first(INPUT)).shape == (2, 2)
    hook.remove()
    assert not hasattr(first, "_hf_hook")


def test_layers_are_stored_in_a_small_type(model: nn.Sequential) -> None:
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    assert [model[0].weight.dtype, model[1].weight.dtype] == [torch.bfloat16, torch.float32]
    assert model(INPUT).dtype == torch.float32
    assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("case", ["disk_offload", "dispatch", "load"])
def test_a_full_disk_is_one_error_and_leaves_no_file(tmp_path: Path, case: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(256, 256))
    folder, places = tmp_path / "offload", {"0": "disk", "1": "disk"}
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    calls = {
        "disk_offload": lambda: disk_offload(model, folder, "cpu"),
        "dispatch": lambda: dispatch_model(model, places, offload_dir=folder),
        "load": lambda: load_checkpoint_and_dispatch(
            model, tmp_path / "model.safetensors", places, offload_folder=folder, dtype=torch.float16
        ),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(DiskFullError, match=r"writing the [\d,]+ bytes of 1\.weight failed.* Fix: free space"):
            calls[case]()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(folder) == []
    with pytest.raises(DiskError, match="cannot make the folder of offloaded weights"):
        disk_offload(model, tmp_path / "model.safetensors" / "inside", "cpu")
