"""BNPO, TRL's name: the clipped surrogate, averaged over the tokens of a micro-batch of one process.

The only loss that depends on the size of a micro-batch. TRL's documentation cites no paper.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(clipped_ratio, "local_token_mean", reads=CLIP_SETTINGS, clips_ratio=True, metrics=CLIP_METRICS)
