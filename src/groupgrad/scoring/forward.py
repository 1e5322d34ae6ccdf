"""Log-probabilities and entropies of a batch's completion tokens.

Models that support attention layouts run on the flat tokens of `layout.py`: each distinct prompt once, nothing padded.
Other models run on dense rows padded on the right. In a decoder (attention, recurrence or convolution alike) such
padding cannot reach a token on its left, so no mask is needed and the kernels for plain causal attention run. Only the
load-balancing loss of a mixture of experts counts tokens and gets the mask. Layouts stay inside this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from groupgrad import dist
from groupgrad.batch import Batch, StepTotals, TokenScores, on_host, to_device
from groupgrad.dist import RankGroup
from groupgrad.memory.oom import score_in_parts
from groupgrad.models.adapters import dora_scales_kept
from groupgrad.models.reference import Reference
from groupgrad.models.shards import gather_per_module, is_fully_sharded, is_sharded, is_zero_sharded
from groupgrad.models.unwrapping import output_head, unwrap
from groupgrad.scoring.attention import attention_dropout, continues_prefixes, flat_obstacle, without_cudnn_attention
from groupgrad.scoring.beginnings import with_beginnings_once
from groupgrad.scoring.early_gradients import PrecomputedGradient
from groupgrad.scoring.fused_modules import compiled_parts
from groupgrad.scoring.head_hook import HeadHook
from groupgrad.scoring.layout import ForwardInputs, dense_inputs, flat_inputs
from groupgrad.scoring.logit_transform import head_layer, logit_transform
from groupgrad.scoring.tiled_head import LogitTransform
from groupgrad.scoring.vlm import with_images
from groupgrad.types import Media, Prompt

InputLayout = Literal["shared", "packed", "dense"]


@dataclass(slots=True, frozen=True)
class ForwardOptions:
    """Options for scoring completion tokens."""

    temperature: float = 1.0
    """Divides the logits, as in sampling."""
    pad_id: int = 0
    """Token id that fills the right of short rows; no token attends to it."""
    entropy_gradient: bool = False
    """Let gradients flow through the entropies."""
    aux_loss: bool = False
    """Compute the load-balancing loss of a mixture of experts."""
    weighs_balance: bool = False
    """The model's load-balancing loss weighs tokens by the attention mask (found by the start-up check), so sharing
    prompts does not change it."""
    layout: InputLayout | None = None
    """Each prompt once (`shared`), once a row (`packed`), or padded (`dense`); None: the best that the model runs."""
    tiled_head: bool = True
    """Never keep the logits of all tokens, where the head's arithmetic is known."""
    rank_group: RankGroup | None = None
    """Ranks that hold the same batches and share the tokens of each pass; None if this rank computes all tokens."""
    image_example: Prompt | None = None
    """A prompt with an image; None for text-only models. Under ZeRO-3 a rank adds it to passes without images, so that
    all ranks gather the weights of the vision tower."""


def score_tokens(
    model: nn.Module,
    batch: Batch,
    options: ForwardOptions,
    precomputed: PrecomputedGradient | None = None,
) -> TokenScores:
    """Log-probs and entropies of the completion tokens of `batch` under `model`, differentiable in its parameters.

    `model` may be wrapped for data parallelism. Logits are computed only for loss tokens (`trained`); all other tokens
    (tool results, masked rows) score 0. The head's own scales, caps and biases are applied. `precomputed` saves the
    tiled head work and changes no result.

    Collective for a model whose parameters are sharded over ranks, even for a batch without tokens. Collective with
    `options.rank_group`, and so is the backward pass: all ranks of the group get the scores of all tokens, and the
    ranks' gradients add up to the gradient of the sum of their losses.
    """
    if _needs_placeholder(model, batch, options):
        from groupgrad.integrations.sharding.sharded_scores import score_beside

        score = partial(_score_rows, model, options=options)
        placeholder = _placeholder(options).to(batch.offsets.device)
        scores = score_beside(placeholder, score, batch.by_branch(), precomputed)
    else:
        scores = _score_rows(model, batch.by_branch(), options, precomputed)
    if is_fully_sharded(model):
        from groupgrad.integrations.sharding.sharded_scores import with_vision_tower

        scores = with_vision_tower(model, scores)
    return scores


def _score_rows(
    model: nn.Module,
    batch: Batch,
    options: ForwardOptions,
    precomputed: PrecomputedGradient | None = None,
) -> TokenScores:
    """The plain path: lays out the rows, hooks the output head, and runs the model once."""
    inputs = forward_inputs(model, batch, options)
    if batch.has_images:
        inputs = with_images(model, batch, inputs)
    hook = _hook_for(batch, inputs, options, precomputed)
    # Dense rows have no flat tokens to cut: every rank of the group computes them all.
    if options.rank_group is None or inputs.attention is None:
        scores = _score_pass(model, inputs, hook, options)
    else:
        from groupgrad.integrations.sharding.context_split import score_over_ranks

        score_pass = partial(_score_pass, model, options=options)
        scores = score_over_ranks(score_pass, inputs, hook, options.rank_group)
    return scores if hook.places is None else _scatter(scores, hook.places, batch.num_tokens)


def forward_inputs(model: nn.Module, batch: Batch, options: ForwardOptions) -> ForwardInputs:
    """The rows of a batch without branches in the layout of `model`, without their images."""
    layout = layout_for(model, options) if batch.num_tokens else "dense"
    if layout == "dense":
        return dense_inputs(batch, options.pad_id, aux_loss=options.aux_loss)
    inputs = flat_inputs(
        batch,
        shared_prompts=layout == "shared",
        shared_prefixes=continues_prefixes(model),
        aux_loss=options.aux_loss,
    )
    return with_beginnings_once(inputs) if shares_beginnings(model, options) and not batch.has_images else inputs


def layout_for(model: nn.Module, options: ForwardOptions) -> InputLayout:
    """The layout that `model` runs in.

    The load-balancing loss counts every token of every row. A model whose loss cannot weigh a shared prompt by its rows
    gets a copy of the prompt for each row.
    """
    if options.layout is not None:
        return options.layout
    if flat_obstacle(model) is not None or (model.training and attention_dropout(model)):
        return "dense"
    return "packed" if options.aux_loss and not options.weighs_balance else "shared"


def shares_beginnings(model: nn.Module, options: ForwardOptions) -> bool:
    """True if passes without images compute once what several prompts begin with.

    The load-balancing loss counts the tokens of every prompt, and on a ring of ranks no layout has copies of tokens.
    """
    is_shared = layout_for(model, options) == "shared" and continues_prefixes(model)
    return is_shared and not options.aux_loss and options.rank_group is None


def _hook_for(
    batch: Batch,
    inputs: ForwardInputs,
    options: ForwardOptions,
    precomputed: PrecomputedGradient | None,
) -> HeadHook:
    """The hook that scores the loss tokens at the model's output head."""
    tokens = batch.completion_ids
    hook = HeadHook(tokens, inputs.rows, inputs.predictors, inputs.shape, options.temperature, options.entropy_gradient)
    hook.precomputed = precomputed
    if batch.temperatures is not None:
        hook.scales = (options.temperature / batch.temperatures).nan_to_num(nan=1.0)
    # Elsewhere a GPU computes tokens without a gradient too, since to find them the host would wait for it.
    hook.has_few_gradients = tokens.device.type != "cuda" or batch.totals.entropy_threshold is not None
    return hook if bool(on_host(batch.trained).all()) else hook.at(_loss_tokens(batch))


def _loss_tokens(batch: Batch) -> torch.Tensor:
    """Indices of the loss tokens. Keeps at least one token: the head cannot run on an empty input."""
    places = on_host(batch.trained).nonzero().flatten()
    places = places if len(places) else places.new_zeros(min(1, batch.num_tokens))
    return to_device(places, batch.trained.device)


def _score_pass(model: nn.Module, inputs: ForwardInputs, hook: HeadHook, options: ForwardOptions) -> TokenScores:
    """The scores of the tokens of `hook`, from one forward pass."""
    transform = logit_transform(unwrap(model)) if options.tiled_head else None
    if hook.scales is not None and not _is_linear(output_head(model), transform):
        transform = None  # temperatures scale logits, which only behind such a head is as scaling its input
    on_head = hook.on
    if is_zero_sharded(model):
        from groupgrad.integrations.sharding.sharded_scores import on_shards

        on_head = partial(on_shards, hook)
    with compiled_parts(model, is_dense=inputs.attention is None), on_head(output_head(model), transform):
        output = inputs.run(model)
    scores = hook.scores_of(output.logits) if hook.scores is None else hook.scores
    return replace(scores, aux_loss=getattr(output, "aux_loss", None)) if options.aux_loss else scores


def _is_linear(head: nn.Module | None, transform: LogitTransform | None) -> bool:
    """True if the logits are linear in the input of the head."""
    layer = head_layer(head)
    return layer is not None and layer.linear.bias is None and transform is not None and transform.softcap is None


def _scatter(scores: TokenScores, places: torch.Tensor, num_tokens: int) -> TokenScores:
    """Spreads the scores of the tokens at `places` over all tokens; the others score 0."""
    logprobs, entropy = (
        values.new_zeros(num_tokens).index_copy(0, places.to(values.device), values)
        for values in (scores.logprobs, scores.entropy)
    )
    return replace(scores, logprobs=logprobs, entropy=entropy)


def _needs_placeholder(model: nn.Module, batch: Batch, options: ForwardOptions) -> bool:
    """True if a pass has to compute a row beside the batch's, since ranks that share a model make the same passes.

    A rank without tokens runs the layers for that row, and under ZeRO-3 one without images the vision tower.
    """
    if not batch.num_tokens:
        return not batch.num_rows or is_sharded(model)
    return options.image_example is not None and not batch.has_images and is_zero_sharded(model)


def _placeholder(options: ForwardOptions) -> Batch:
    """A batch of one token, with an image where passes need one."""
    example = options.image_example
    if example is None:
        return build_batch([[options.pad_id]], [0], [[options.pad_id]])
    return build_batch([example.ids], [0], [[options.pad_id]], (example.media,))


def build_batch(
    prompts: list[list[int]],
    prompt_of_row: Sequence[int],
    completions: list[list[int]],
    media: tuple[Media | None, ...] | None = None,
) -> Batch:
    """A batch on the CPU of completions and the prompts (indices into `prompts`) they continue; all tokens train."""
    lengths, prompt_lengths = (torch.tensor([len(ids) for ids in rows]) for rows in (completions, prompts))
    num_rows, num_tokens = len(completions), int(lengths.sum())
    return Batch(
        completion_ids=torch.tensor([token for ids in completions for token in ids], dtype=torch.int64),
        row_of_token=torch.arange(num_rows).repeat_interleave(lengths),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        prompt_ids=torch.tensor([token for ids in prompts for token in ids], dtype=torch.int64),
        prompt_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), prompt_lengths.cumsum(0)]),
        prompt_of_row=torch.tensor(prompt_of_row),
        trained=torch.ones(num_tokens, dtype=torch.bool),
        advantages=torch.ones(num_rows),
        totals=StepTotals(rows=num_rows, tokens=num_tokens),
        media=media,
    )


@torch.no_grad()
def score_without_gradient(
    model: nn.Module, batch: Batch, options: ForwardOptions, *, aux_loss: bool = False
) -> TokenScores:
    """`score_tokens` in evaluation mode (no dropout) and without gradients; the model's modes are restored.

    A batch that does not fit into memory is scored in parts, unless the model is sharded over ranks, which then run it
    together. `aux_loss` keeps the options' auxiliary loss, which is computed on whole batches only.
    """
    options = replace(options, entropy_gradient=False, aux_loss=aux_loss and options.aux_loss)
    with evaluation_mode(model), gather_per_module(model), without_cudnn_attention():
        if options.aux_loss or is_sharded(model):
            return score_tokens(model, batch, options)
        return score_in_parts(batch, lambda part: score_tokens(model, part, options))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module of `model` into evaluation mode; restores each module's own mode afterwards, also on errors.

    The weights must not change inside: the norms of DoRA layers are computed once.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with dora_scales_kept(model):
            yield
    finally:
        for module in training:
            module.training = True


def errors_of_passes(model: nn.Module) -> AbstractContextManager[None]:
    """Context of passes that score whole rows: an error in one is raised on all ranks, unless they share the model.

    Ranks that share it wait inside the pass, where no agreement on an error reaches them. There the failed rank raises
    its error at once, and in training the watch over the run ends the others with it.
    """
    return nullcontext() if is_sharded(model) else dist.errors_on_all_ranks()


class OldAndRefScorer:
    """Scores batches without dropout or gradients. Batches and results are on the CPU; the models run on `device`."""

    def __init__(
        self, policy: nn.Module, reference: Reference | None, options: ForwardOptions, device: torch.device | str
    ):
        self._policy, self._reference, self._options, self._device = policy, reference, options, device

    def policy(self, batch: Batch, *, rows_per_pass: int | None = None) -> TokenScores:
        """Scores by the policy as it is now, `rows_per_pass` rows at a time; None: all at once."""
        return self._score(self._policy, batch, rows_per_pass)

    def reference_logprobs(self, batch: Batch, *, rows_per_pass: int | None = None) -> torch.Tensor | None:
        """(L,) log-probs (nats) by the reference model; None if there is none."""
        if self._reference is None:
            return None
        with self._reference.active() as module:
            return self._score(module, batch, rows_per_pass).logprobs

    def _score(self, model: nn.Module, batch: Batch, rows_per_pass: int | None) -> TokenScores:
        size = rows_per_pass or max(1, batch.num_rows)
        # An empty batch is one pass too: the passes of a model that is spread over ranks are collective.
        starts = range(0, max(1, batch.num_rows), size)
        parts = [batch]
        if len(starts) > 1:
            parts = [batch.select(range(start, min(start + size, batch.num_rows))) for start in starts]
        scores = [score_without_gradient(model, part.to(self._device), self._options) for part in parts]
        return TokenScores(
            torch.cat([score.logprobs for score in scores]).cpu(), torch.cat([score.entropy for score in scores]).cpu()
        )
