"""Pipelines: a model cut into stages, and whole batches run through them.

In the order of use: `split` keeps of a model what this rank's stages need (the first step of laying it out);
`stages_of` gives the modules that zero 3 shards as one root each (the model itself where it was not split); `Pipeline`
runs batches, by `run_batch` and `evaluate_batch`.
"""

from piledriver.engine.pipeline.run import Pipeline, evaluate_batch, run_batch
from piledriver.engine.pipeline.schedules import microbatches_of
from piledriver.engine.pipeline.split import split, split_of, stages_of

__all__ = ["Pipeline", "evaluate_batch", "microbatches_of", "run_batch", "split", "split_of", "stages_of"]
