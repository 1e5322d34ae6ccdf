"""LUSPO: the clipped surrogate of `grpo`, summed over each completion and averaged over completions.

It is defined for ratios of sequences (`importance_sampling_level="sequence"`). The paper has `epsilon` = 0.002 and
`epsilon_high` = 0.0025 (section 5.1); the defaults are for ratios of tokens.

Worked: `ratios=[[1], [1, 1, 1]], advantages=[-1, -3]` gives `loss=5`.

When: ratios of sequences (GSPO) without their preference for short completions.

Source: arXiv:2602.05261.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(
    clipped_ratio,
    "sequence_sum",
    reads=CLIP_SETTINGS,
    level="sequence",
    grows_with_ratio="negative",
    metrics=CLIP_METRICS,
)
