"""DAPO: the clipped surrogate of `grpo`, averaged over all tokens of the step.

Every token counts the same, whichever completion it is in. Losses of tokens of 1 in one completion, and of 2, 3 and 4
in another, give 10 / 4 = 2.5, where `grpo` gives (1 + 3) / 2 = 2.

When: a good first choice.

Source: arXiv:2503.14476, eq. 8.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(clipped_ratio, "token_mean", reads=CLIP_SETTINGS, grows_with_ratio="negative", metrics=CLIP_METRICS)
