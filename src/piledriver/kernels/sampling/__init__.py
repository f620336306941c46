"""Choose one token from each row of logits by temperature, top-k, top-p and min-p, at a given uniform number.

The number comes from a counter-based stream: a token is a pure function of its logits, its settings and its number.
`triton` runs on a GPU, `reference` everywhere.
"""

from piledriver.kernels.sampling.dispatch import draw_tokens, mask_tokens, token_logprobs
from piledriver.kernels.sampling.rows import Drawn, RowSettings

__all__ = ["Drawn", "RowSettings", "draw_tokens", "mask_tokens", "token_logprobs"]
