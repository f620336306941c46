"""`accelerate.utils.launch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piledriver.compat.accelerate.utils.other import get_free_port
from piledriver.runtime import environment
from piledriver.runtime.launch.accelerate_flags import launch_fields


class PrepareForLaunch:
    """A function that sets its rank before it runs, for launchers that pass an index only."""

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = distributed_type
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function as rank `index`."""
        environment.update({"LOCAL_RANK": str(index), "RANK": str(index), "FORK_LAUNCHED": "1"})
        self.launcher(*args)


def prepare_multi_gpu_env(args: Any) -> dict[str, str]:
    """Set torchrun's attributes on parsed `accelerate launch` arguments; return the environment of the processes."""
    fields = launch_fields(vars(args))
    if args.main_process_port in (None, 0):
        args.main_process_port = get_free_port() if args.main_process_port == 0 else 29500
    args.nproc_per_node, args.master_port = str(fields.get("nproc", 1)), str(args.main_process_port)
    if "nnodes" in fields:
        args.nnodes, args.node_rank = fields["nnodes"], fields.get("node_rank", 0)
        args.rdzv_endpoint = fields["rdzv_endpoint"]
    return {**environment.snapshot(), **fields.get("env", {}), "ACCELERATE_MIXED_PRECISION": args.mixed_precision}
