"""Compression while any torch model trains: rounded weights and activations, masks that begin at a step.

It is the mechanism behind `piledriver.compat.deepspeed.init_compression`; models of this library have `compress.prune`,
`compress.quantise` and `compress.recover`.

- `rules`: what is done to a layer, from which step on; `layers`: layers that follow rules; `fake_quantise`: rounding
- `clean`: make the result permanent, with smaller layers where whole rows go
"""

from __future__ import annotations

from piledriver.compress.scheduled.clean import clean_layer, remove_inputs
from piledriver.compress.scheduled.layers import ScheduledLayer, attach_rule, scheduled_layers
from piledriver.compress.scheduled.rules import ActivationRule, MaskRule, WeightRule

__all__ = [
    "ActivationRule",
    "MaskRule",
    "ScheduledLayer",
    "WeightRule",
    "attach_rule",
    "clean_layer",
    "remove_inputs",
    "scheduled_layers",
]
