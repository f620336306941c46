"""Pipelines: a model cut into stages, and whole batches run through them.

In the order of use: `split_stages` keeps of a model what this rank's stages need (the first step of laying it out);
`stages_of` gives the modules that zero 3 shards as one root each (the model itself where it was not split_stages);
`run.Pipeline` runs batches, by `run.run_batch` and `run.evaluate_batch`. `run` is imported where it is needed: torch's
pipelining takes a second to import.
"""

from piledriver.engine.pipeline_parallel.schedules import microbatches_of
from piledriver.engine.pipeline_parallel.split import split_of, split_stages, stage_borders, stages_of

__all__ = ["microbatches_of", "split_of", "split_stages", "stage_borders", "stages_of"]
