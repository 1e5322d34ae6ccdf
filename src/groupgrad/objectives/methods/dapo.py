"""DAPO: the clipped surrogate of `grpo`, averaged over all tokens of the step.

Every token counts the same, whichever completion it is in.

Worked: `ratios=[[1], [1, 1, 1]], advantages=[-1, -3]` gives `loss=2.5`.

When: a good first choice.

Source: arXiv:2503.14476, eq. 8.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(clipped_ratio, "token_mean", reads=CLIP_SETTINGS, grows_with_ratio="negative", metrics=CLIP_METRICS)
