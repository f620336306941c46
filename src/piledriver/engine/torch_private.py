"""What `fully_shard` keeps of a module: torch has no public way to it, and names differ between its versions."""

from __future__ import annotations

from typing import Any


def shared_state(module: Any) -> Any:
    """What all sharded modules under one root share."""
    return module._get_fsdp_state()._state_ctx


def parameter_groups(state: Any) -> list[Any]:
    """The groups of parameters that are gathered together: one per module before torch 2.13."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups else [group for group in [state._fsdp_param_group] if group is not None]
