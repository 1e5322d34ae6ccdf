"""Dr. GRPO: the clipped surrogate of `grpo`, summed over tokens and divided by a constant.

The constant is completions times `max_completion_length`. With `scale_rewards="none"` it has neither bias of `grpo`.

Worked: `ratios=[[1], [1, 1, 1]], advantages=[-1, -3], max_completion_length=5` gives `loss=1`.

When: lengths must not bias the gradient.

Source: arXiv:2503.20783, section 3.2.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(clipped_ratio, "constant", reads=CLIP_SETTINGS, grows_with_ratio="negative", metrics=CLIP_METRICS)
