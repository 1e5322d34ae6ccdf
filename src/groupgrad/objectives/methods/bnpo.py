"""BNPO: the clipped surrogate of `grpo`, averaged over the tokens of a micro-batch of one process.

It is TRL's name; its documentation cites no paper. The sum of token losses is divided by the number of loss tokens in
the micro-batch, so results vary with the micro-batch size; with one completion a micro-batch it equals `grpo`.

Worked: `ratios=[[1], [1, 1, 1]], advantages=[-1, -3]` gives `loss=2.5`;
`ratios=[[1], [1, 1, 1]], advantages=[-1, -3], micro_batches=2` gives `loss=2`.

When: only to reproduce results; no other loss depends on the micro-batch size.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(
    clipped_ratio, "local_token_mean", reads=CLIP_SETTINGS, grows_with_ratio="negative", metrics=CLIP_METRICS
)
