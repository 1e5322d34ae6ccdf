"""BNPO: the clipped surrogate of `grpo`, averaged over the tokens of a micro-batch of one process.

It is TRL's name; its documentation cites no paper. The sum of token losses is divided by the number of loss tokens in
the micro-batch, so results vary with the micro-batch size; with one completion a micro-batch it equals `grpo`.
Losses of tokens of 1 in one micro-batch, and of 2, 3 and 4 in another, give (1 + 3) / 2 = 2; in one micro-batch they
give 2.5.

When: only to reproduce results; no other loss depends on the micro-batch size.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(
    clipped_ratio, "local_token_mean", reads=CLIP_SETTINGS, grows_with_ratio="negative", metrics=CLIP_METRICS
)
