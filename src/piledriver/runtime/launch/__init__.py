"""Start processes: launch config, elastic agent, Slurm, notebooks."""
