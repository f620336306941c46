"""Slurm batch script that runs `piledriver launch` once per node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from piledriver.runtime.launch.config import LaunchConfig

_TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --time={time}
#SBATCH --output={name}-%j.log
#SBATCH --signal=B:TERM@120

set -euo pipefail
RENDEZVOUS_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RENDEZVOUS_PORT=$((20000 + SLURM_JOB_ID % 10000))
export RENDEZVOUS_HOST RENDEZVOUS_PORT

# One launcher per node; it starts one process per device and numbers them by SLURM_NODEID.
srun --kill-on-bad-exit=1 bash -c 'exec piledriver launch \\
    --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv-id "$SLURM_JOB_ID" \\
    --rdzv-endpoint "{endpoint}" --nproc {nproc} --max-restarts {restarts} \\
    {command}'
"""
ENDPOINT = "$RENDEZVOUS_HOST:$RENDEZVOUS_PORT"
"""Rendezvous of the script's nodes, expanded by the shell on a node."""


def slurm_script(
    wanted: LaunchConfig,
    script: str,
    arguments: Sequence[str] = (),
    *,
    name: str = "piledriver",
    nodes: int = 1,
    time: str = "24:00:00",
    module: bool = False,
) -> str:
    """Return the text of the batch script.

    >>> print(slurm_script(LaunchConfig(nproc=8), "train.py", ["--lr", "1e-3"], nodes=2).splitlines()[2])
    #SBATCH --nodes=2
    """
    command = shlex.join([*_further_flags(wanted), *(["-m"] if module else []), script, *arguments])
    return _TEMPLATE.format(
        name=name,
        nodes=nodes,
        gpus=wanted.nproc if wanted.nproc != "auto" else 8,
        time=time,
        nproc=wanted.nproc,
        restarts=wanted.max_restarts,
        endpoint=ENDPOINT,
        # The template puts it in single quotes.
        command=command.replace("'", "'\\''"),
    )


def _further_flags(wanted: LaunchConfig) -> list[str]:
    """Return the settings that the template has no place for, as flags."""
    flags: list[str] = []
    for name in ("cpu", "bind_numa", "debug_collectives", "alias_accelerate"):
        flags += [f"--{name.replace('_', '-')}"] if getattr(wanted, name) else []
    for name in ("log_dir", "mixed_precision", "gradient_accumulation_steps"):
        value = getattr(wanted, name)
        flags += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    for name, value in wanted.env.items():
        flags += ["--env", f"{name}={value}"]
    if wanted.rdzv_timeout_seconds != LaunchConfig().rdzv_timeout_seconds:
        flags += ["--rdzv-timeout-seconds", str(wanted.rdzv_timeout_seconds)]
    return flags
