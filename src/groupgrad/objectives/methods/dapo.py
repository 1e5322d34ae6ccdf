"""DAPO: the clipped surrogate, averaged over all tokens of the step.

Source: arXiv:2503.14476, eq. 8.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(clipped_ratio, "token_mean", reads=CLIP_SETTINGS, clips_ratio=True, metrics=CLIP_METRICS)
