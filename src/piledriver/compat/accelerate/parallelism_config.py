"""`accelerate.parallelism_config`: sizes of mesh axes, which `Accelerator` converts to a `Layout`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, cast

from piledriver.runtime import environment

_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


@dataclass
class ParallelismConfig:
    """The size of each axis; one that is not given is read from the environment, or is 1."""

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    device_mesh = None

    def __post_init__(self) -> None:
        environ = environment.snapshot()
        for axis in _AXES:
            name = f"{axis}_size"
            if getattr(self, name) is None:
                setattr(self, name, int(environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")))
        self.cp_backend = self.cp_backend or environ.get("PARALLELISM_CONFIG_CP_BACKEND", "torch")
        self.sp_backend = self.sp_backend or environ.get("PARALLELISM_CONFIG_SP_BACKEND", "deepspeed")
        if self._size("cp") > 1 and self.cp_handler is None:
            from piledriver.compat.accelerate.utils.dataclasses import TorchContextParallelConfig

            self.cp_handler = TorchContextParallelConfig(environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY"))
        sizes = {axis: self._size(axis) for axis in _AXES}
        for axis, size in sizes.items():
            if size < 1 and not (axis == "dp_shard" and size == -1):
                raise ValueError(f"{axis}_size must be at least 1, but got {size}")
        if (sizes["tp"] > 1 or sizes["cp"] > 1) and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
            raise ValueError(
                "Tensor/Context parallelism (tp/cp_size > 1) cannot be used with pure data parallelism "
                "(dp_replicate_size > 1 and dp_shard_size == 1). Set dp_shard_size > 1 to shard the model too."
            )
        if sizes["cp"] > 1 and sizes["sp"] > 1:
            raise ValueError("Context parallelism and sequence parallelism cannot be used together")

    def _size(self, axis: str) -> int:
        return int(getattr(self, f"{axis}_size"))

    @property
    def active_mesh_dims(self) -> list[str]:
        """Return the axes of size over 1."""
        return [axis for axis in _AXES if self._size(axis) > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """Return the data axes of size over 1."""
        return [axis for axis in ("dp_replicate", "dp_shard") if self._size(axis) > 1]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Return the other axes of size over 1."""
        return [axis for axis in ("tp", "cp", "sp") if self._size(axis) > 1]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Return the axes over which parameters are sharded."""
        return [axis for axis in ("dp_shard", "cp") if self._size(axis) > 1]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Return the axes over which a loss is averaged."""
        return [axis for axis in ("dp_replicate", "dp_shard", "cp") if self._size(axis) > 1]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Return the mesh dimensions that FSDP uses."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    @property
    def total_size(self) -> int:
        """Return the number of ranks in the mesh."""
        total = 1
        for axis in _AXES:
            total *= self._size(axis)
        return total

    @property
    def non_data_parallel_size(self) -> int:
        """Return the number of ranks that read the same data."""
        return self._size("tp") * self._size("cp") * self._size("sp")

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks that read different data."""
        return self._size("dp_replicate") * self._size("dp_shard")

    @property
    def dp_replicate_enabled(self) -> bool:
        """Return whether the model is replicated."""
        return self._size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Return whether parameters are sharded."""
        return self._size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Return whether tensors are split."""
        return self._size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Return whether sequences are split."""
        return self._size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Return whether heads are split."""
        return self._size("sp") > 1

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        names = tuple(self.active_mesh_dims)
        return names, tuple(self._size(name) for name in names)

    def build_device_mesh(self, device_type: str) -> Any:
        """Return the mesh, with the flattened axes of sharding and averaging."""
        from torch.distributed import device_mesh

        names, shape = self._get_mesh()
        if not names:
            return None
        mesh = device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)
        for joined, name in (
            (self.dp_dim_names, "dp"),
            (self.dp_shard_cp_dim_names, "dp_shard_cp"),
            (self.dp_cp_dim_names, "dp_cp"),
        ):
            if joined:
                mesh[cast(Any, joined)]._flatten(name)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the mesh, built on first use."""
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("You need to pass a device_type e.g cuda to build the device mesh")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type is not None and self.device_mesh.device_type != device_type:
            raise ValueError(
                f"The device_mesh is already created with device type {self.device_mesh.device_type}. "
                f"However, you are trying to get a device mesh with device_type {device_type}."
            )
        return self.device_mesh

    def to_json(self) -> dict[str, Any]:
        """Return sizes and options."""
        return {key: value for key, value in self.__dict__.items() if not key.endswith("_handler")}

    def _validate_accelerator(self, accelerator: Any) -> None:
        if self.total_size == 1:
            warnings.warn(
                "ParallelismConfig.total_size==1, disabling all parallelism. This may be unexpected.", stacklevel=2
            )
        elif self.total_size != accelerator.num_processes:
            raise ValueError(
                f"ParallelismConfig total_size ({self.total_size}) does not match num_processes "
                f"({accelerator.num_processes}): make the product of the axes the number of processes."
            )
