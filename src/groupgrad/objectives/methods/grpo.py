r"""GRPO: the clipped surrogate, averaged over each completion and then over completions.

With the policy ratio c of a token or sequence,

$$\ell_{i,t} = -\min\left(\min(c_{i,t}, \delta) A_i,\; clip(c_{i,t}, 1-\epsilon, 1+\epsilon_{high}) A_i\right)$$

`delta` is a ceiling of the first ratio (arXiv:2505.07291), none by default.

Worked: `ratios=[[1.5]], advantages=[1]` gives `loss=-1.2, gradient=[[0]]`;
`ratios=[[1.5]], advantages=[-1]` gives `loss=1.5, gradient=[[1.5]]`;
`ratios=[[1], [1, 1, 1]], advantages=[-1, -3]` gives `loss=2`.

When: to reproduce older results; long completions count less per token.

Source: arXiv:2402.03300, eq. 3.
"""

from groupgrad.objectives.clipping import CLIP_METRICS, CLIP_SETTINGS, clipped_ratio
from groupgrad.objectives.method import Method

METHOD = Method(clipped_ratio, "sequence_mean", reads=CLIP_SETTINGS, grows_with_ratio="negative", metrics=CLIP_METRICS)
