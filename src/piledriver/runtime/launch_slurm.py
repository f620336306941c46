"""A Slurm batch script that starts `piledriver launch` once per node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from piledriver.runtime.launch_config import LaunchConfig

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
MEETING_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MEETING_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MEETING_HOST MEETING_PORT

# One launcher per node; it starts one process per device and numbers them by SLURM_NODEID.
srun --kill-on-bad-exit=1 bash -c 'exec piledriver launch \\
    --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv-id "$SLURM_JOB_ID" \\
    --rdzv-endpoint "$MEETING_HOST:$MEETING_PORT" --nproc {nproc} --max-restarts {restarts} \\
    {command}'
"""


def slurm_script(
    wanted: LaunchConfig,
    script: str,
    arguments: Sequence[str] = (),
    *,
    name: str = "piledriver",
    nodes: int = 1,
    time: str = "24:00:00",
) -> str:
    """The text of the batch script.

    >>> print(slurm_script(LaunchConfig(nproc=8), "train.py", ["--lr", "1e-3"], nodes=2).splitlines()[2])
    #SBATCH --nodes=2
    """
    command = shlex.join([script, *arguments]).replace("'", "'\\''")
    return _TEMPLATE.format(
        name=name,
        nodes=nodes,
        gpus=wanted.nproc if wanted.nproc != "auto" else 8,
        time=time,
        nproc=wanted.nproc,
        restarts=wanted.max_restarts,
        command=command,
    )
