"""GRPO: the clipped surrogate, averaged over each completion and then over completions.

Source: arXiv:2402.03300, eq. 3.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(clipped_ratio, "sequence_mean", reads=CLIP_SETTINGS, clips_ratio=True, metrics=CLIP_METRICS)
