"""Log-probabilities and entropies of a batch's completion tokens.

Models whose attention can be driven see the flat layout of `layout.py`: each distinct prompt once, nothing padded. All
others see a dense, right-padded one made here. In a decoder (attention, recurrence or convolution alike) padding on the
right cannot reach a token on its left, so no mask is needed and the kernels for plain causal attention run. Only the
load balancing of a mixture of experts counts tokens and gets the mask. Nothing outside this room knows of layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from groupgrad.batch import Batch, TokenScores
from groupgrad.modeling.fused_modules import compiled_parts
from groupgrad.modeling.scoring.attention import AttentionPlan, attention_dropout, plannable, run_planned
from groupgrad.modeling.scoring.head import LogitTransform, PrecomputedGradient, scores_with_gradient, tiled_scores
from groupgrad.modeling.scoring.layout import FlatLayout, flat_layout
from groupgrad.modeling.scoring.logit_transform import head_layer, logit_transform
from groupgrad.modeling.systems.oom import score_in_parts
from groupgrad.modeling.systems.zero3 import gather_per_module, is_sharded
from groupgrad.modeling.vlm import (
    ImageSegment,
    ModelInputs,
    PromptImages,
    flat_image_inputs,
    padded_image_inputs,
    prompt_images,
)

# Logits are turned into entropies this many tokens at a time, which bounds the scratch memory to tokens x vocabulary.
ENTROPY_TOKENS = 512

Layout = Literal["shared", "packed", "dense"]


@dataclass(slots=True, frozen=True)
class ForwardOptions:
    """How to score."""

    temperature: float = 1.0
    """Divides the logits, as in sampling."""
    pad_id: int = 0
    """Token id that fills the right of short rows; never looked at."""
    entropy_gradient: bool = False
    """Let gradients flow through the entropies."""
    aux_loss: bool = False
    """Ask a mixture of experts for its load-balancing loss."""
    weighs_balance: bool = False
    """The model's load-balancing loss heeds how often a token counts (the start-up check knows), so that sharing
    changes nothing of it."""
    layout: Layout | None = None
    """Each prompt once (`shared`), once a row (`packed`), or padded (`dense`); None: the best that the model runs."""
    tiled_head: bool = True
    """Never keep the logits of all tokens, where it is known what the model makes of its head's output."""


def layout_for(model: nn.Module, options: ForwardOptions) -> Layout:
    """The layout in which `model` is run. Load balancing counts every token of every row: a prompt that is computed
    once counts once a row, or where the model cannot be told so, is not shared."""
    if options.layout is not None:
        return options.layout
    if plannable(model) is not None or (model.training and attention_dropout(model)):
        return "dense"
    return "packed" if options.aux_loss and not options.weighs_balance else "shared"


def score_tokens(
    model: nn.Module, batch: Batch, options: ForwardOptions, precomputed: PrecomputedGradient | None = None
) -> TokenScores:
    """What `model` says of the completion tokens of `batch`; gradients flow into its parameters.

    `model` may be wrapped for data parallelism. The logits of loss tokens (`trained`) alone are computed, and the
    scores of all others (a tool's words, masked rows) are 0; the head's own scales, caps and biases are kept.
    `precomputed` saves the tiled head work and changes nothing.

    Collective for a model whose parameters are spread over ranks, also without tokens.
    """
    if not batch.num_tokens and (is_sharded(model) or not batch.num_rows):
        return _nothing_to_score(model, batch, options)
    asked = None if bool(batch.trained.all()) else _loss_tokens(batch)
    scores = _score_places(model, batch, options, precomputed, asked)
    if asked is None:
        return scores
    return replace(
        scores, logprobs=_spread(scores.logprobs, asked, batch), entropy=_spread(scores.entropy, asked, batch)
    )


def _nothing_to_score(model: nn.Module, batch: Batch, options: ForwardOptions) -> TokenScores:
    """The scores of no tokens, by a pass over a made-up one: other ranks go through the model now, and none can alone.
    They hang together with the pass, so that a backward pass goes through the model too."""
    token, zero = torch.full((1,), options.pad_id, device=batch.offsets.device), batch.offsets.new_zeros(1)
    bounds = torch.cat([zero, zero + 1])
    made_up = Batch(
        completion_ids=token,
        row_of_token=zero,
        offsets=bounds,
        prompt_ids=token,
        prompt_offsets=bounds,
        prompt_of_row=zero,
        trained=zero == 0,
        advantages=torch.zeros(1, device=zero.device),
        totals=batch.totals,
    )
    scores = score_tokens(model, made_up, options)
    return replace(scores, logprobs=scores.logprobs[:0], entropy=scores.entropy[:0])


def _spread(values: torch.Tensor, places: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(L,) with `values` at `places` and 0 elsewhere."""
    return values.new_zeros(batch.num_tokens).index_copy(0, places.to(values.device), values)


def _loss_tokens(batch: Batch) -> torch.Tensor:
    """Places of the loss tokens; the first token's if there are none, since the head wants something to do."""
    places = batch.trained.nonzero().flatten()
    return places if len(places) else places.new_zeros(min(1, batch.num_tokens))


def _score_places(
    model: nn.Module,
    batch: Batch,
    options: ForwardOptions,
    precomputed: PrecomputedGradient | None,
    asked: torch.Tensor | None,
) -> TokenScores:
    """Scores of the completion tokens at the places `asked`, or of all."""
    tokens = batch.completion_ids if asked is None else batch.completion_ids[asked]
    if asked is not None and precomputed is not None:
        precomputed = PrecomputedGradient(precomputed.logprobs[asked], precomputed.gradient[asked])
    layout = layout_for(model, options) if batch.num_tokens else "dense"
    source = _dense_input(model, batch, options) if layout == "dense" else _flat_input(model, batch, options, layout)
    rows, positions, view = source.rows, source.positions, source.view
    if asked is not None:
        rows, positions = rows[asked], positions[asked]
    head = _scoring_head(model, (rows, positions), source.shape, tokens, options, precomputed)
    with view.embedding_true_ids(model), compiled_parts(model), head as seen:
        if source.plan is None or source.places is None:
            output = model(input_ids=view.ids, use_cache=False, **source.extra)
        else:
            output = run_planned(model, view.ids, source.places, source.plan, **source.extra)
    aux_loss = getattr(output, "aux_loss", None) if options.aux_loss else None
    if seen.scores is not None:
        return replace(seen.scores, aux_loss=aux_loss)
    # The head's input was narrowed to the completion tokens unless this model computes its logits in another way.
    logits = output.logits
    logits = logits[0] if seen.narrowed else _at(logits, rows, positions + logits.shape[1] - source.shape[1])
    return _scores(logits, tokens, options, aux_loss)


@torch.no_grad()
def score_without_gradient(
    model: nn.Module, batch: Batch, options: ForwardOptions, *, aux_loss: bool = False
) -> TokenScores:
    """`score_tokens` in evaluation mode (no dropout) and without gradients; the model's modes are restored.

    A batch that does not fit into memory is scored in parts, unless ranks go through the model together because its
    parameters are spread over them. `aux_loss` keeps what the options say of the auxiliary loss, which is measured on
    whole batches alone.
    """
    asked = replace(options, entropy_gradient=False, aux_loss=aux_loss and options.aux_loss)
    with evaluation_mode(model), gather_per_module(model):
        if asked.aux_loss or is_sharded(model):
            return score_tokens(model, batch, asked)
        return score_in_parts(batch, lambda part: score_tokens(model, part, asked))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module of `model` in evaluation mode inside, each back in its own mode afterwards, also on errors."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(slots=True)
class _Input:
    """What the model is given, and where the completion tokens are predicted."""

    shape: torch.Size
    """(B, T), or (1, T) for flat tokens."""
    rows: torch.Tensor
    """(L,) int64."""
    positions: torch.Tensor
    """(L,) int64, in their rows of the input."""
    view: ModelInputs
    extra: dict[str, Any]
    """Further arguments."""
    plan: AttentionPlan | None = None
    """None: rows of their own."""
    places: torch.Tensor | None = None
    """(T,) or (3, T) positions of flat tokens."""


def _dense_input(model: nn.Module, batch: Batch, options: ForwardOptions) -> _Input:
    ids, mask, rows, positions = _dense_layout(batch, options.pad_id)
    view = padded_image_inputs(model, ids, _row_sights(model, batch, _sights(model, batch)))
    extra: dict[str, Any] = dict(view.inputs)
    if view.rope is not None:
        extra["position_ids"] = view.rope
    if options.aux_loss:
        extra |= {"attention_mask": mask, "output_router_logits": True}
    return _Input(ids.shape, rows, positions, view, extra)


def _flat_input(model: nn.Module, batch: Batch, options: ForwardOptions, layout: Layout) -> _Input:
    flat = flat_layout(batch, share=layout == "shared", keep_last=options.aux_loss)
    sights = _sights(model, batch)
    of_rows = _row_sights(model, batch, sights)
    laid = [
        ImageSegment(
            part.start, part.length, part.first, sights[part.prompt] if part.row is None else of_rows[part.row]
        )
        for part in flat.stretches
    ]
    view = flat_image_inputs(model, flat.ids, flat.positions, laid)
    extra: dict[str, Any] = {"output_router_logits": True} if options.aux_loss else {}
    if options.aux_loss and layout == "shared":
        # The mask takes no part in attention, where the plan stands in its place; it weighs the tokens of the balance.
        extra["attention_mask"] = _row_counts(flat)[None]
    return _Input(
        shape=torch.Size((1, len(flat.ids))),
        rows=torch.zeros_like(flat.predictors),
        positions=flat.predictors,
        view=view,
        extra={**view.inputs, **extra},
        plan=view.attention_plan(flat.plan),
        places=flat.positions if view.rope is None else view.rope,
    )


def _row_counts(flat: FlatLayout) -> torch.Tensor:
    """(T,) float: the number of rows that have each flat token of a shared layout, more than 1 for prompts alone."""
    counts = torch.ones(len(flat.ids))
    rows = Counter(part.prompt for part in flat.stretches if part.row is not None and part.first)
    for part in flat.stretches:
        if part.row is None:
            counts[part.start : part.start + part.length] = rows[part.prompt]
    return counts.to(flat.ids.device)


def _sights(model: nn.Module, batch: Batch) -> list[PromptImages | None]:
    """How the model sees the images of each distinct prompt, (Q,)."""
    if batch.media is None:
        return [None] * batch.num_prompts
    prompts = [torch.tensor(ids, dtype=torch.int64) for ids in batch.prompts()]
    return [None if media is None else prompt_images(model, ids, media) for ids, media in zip(prompts, batch.media)]


def _row_sights(model: nn.Module, batch: Batch, sights: list[PromptImages | None]) -> list[PromptImages | None]:
    """How the model sees the images of each row, (B,): those of its prompt, or more where tools put more into it."""
    found = [sights[q] for q in batch.prompt_of_row.tolist()]
    for i, media in enumerate(batch.row_media or ()):
        if media is not None:
            q = int(batch.prompt_of_row[i])
            prompt = batch.prompt_ids[batch.prompt_offsets[q] : batch.prompt_offsets[q + 1]]
            ids = torch.cat([prompt, batch.completion_ids[batch.offsets[i] : batch.offsets[i + 1]]])
            known = min((len(types) for types in media.token_tensors.values()), default=len(ids))
            found[i] = prompt_images(model, ids[:known], media)
    return found


def _dense_layout(batch: Batch, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows (B, T), their mask, and for each completion token the row and the position whose logits predict it."""
    device = batch.completion_ids.device
    prompt_lengths = batch.prompt_offsets.diff()[batch.prompt_of_row]
    completion_lengths = batch.offsets.diff()
    lengths = prompt_lengths + completion_lengths
    num_rows, width = batch.num_rows, int(lengths.max()) if batch.num_rows else 0
    place = torch.arange(width, device=device).expand(num_rows, width)
    mask = place < lengths[:, None]
    ids = torch.full((num_rows, width), pad_id, dtype=torch.int64, device=device)
    is_prompt = place < prompt_lengths[:, None]
    source = batch.prompt_offsets[batch.prompt_of_row][:, None] + place
    ids[is_prompt] = batch.prompt_ids[source[is_prompt]]
    ids[mask & ~is_prompt] = batch.completion_ids
    rows = batch.row_of_token
    place_in_row = torch.arange(batch.num_tokens, device=device) - batch.offsets[rows]
    return ids, mask.long(), rows, prompt_lengths[rows] + place_in_row - 1


def _at(states: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(L, H) of states (B, T, H) at these rows and positions.

    What a prompt's last token predicts is the first token of many rows, whose gradients add up there: in a fixed order,
    or runs of the same seed would part.
    """
    rows, positions = rows.to(states.device), positions.to(states.device)
    if states.device.type != "cpu":
        return states[rows, positions]  # on GPUs it is this that adds up in a fixed order
    return states.flatten(0, 1).index_select(0, rows * states.shape[1] + positions)


@dataclass(slots=True)
class NarrowedHead:
    """State of the output head during one forward pass."""

    narrowed: bool = False
    """The head received the selected hidden states alone."""
    scores: TokenScores | None = None
    """Scores computed in place of logits, if any."""


@contextmanager
def narrowed_head(
    model: nn.Module,
    places: tuple[torch.Tensor, torch.Tensor],
    shape: torch.Size,
    compute: Callable[[nn.Module, torch.Tensor, NarrowedHead], torch.Tensor] | None = None,
) -> Iterator[NarrowedHead]:
    """Gives the output head only the hidden states at `places` (rows, positions) of an input of (B, T) `shape`.

    The head receives them as (1, L, H). `compute`, if given, takes the head, these states (L, H) and the yielded
    record, and returns the states that the head receives in their place.
    """
    state, (rows, positions) = NarrowedHead(), places
    num_rows, width = shape
    head = output_head(model)
    if head is None or not rows.numel():
        yield state
        return

    def narrow(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = inputs[0]
        if hidden.dim() != 3 or hidden.shape[0] != num_rows or hidden.shape[1] < width:
            return None
        state.narrowed = True
        # Prompt-tuning adapters put virtual tokens in front: positions count from the right end of the input.
        hidden = _at(hidden, rows, positions + hidden.shape[1] - width)
        if compute is not None:
            hidden = compute(module, hidden, state)
        return (hidden.unsqueeze(0), *inputs[1:])

    # The compiler would take the positions of this call for constants and compile every batch anew.
    handle = head.register_forward_pre_hook(torch.compiler.disable(narrow))  # pyright: ignore[reportArgumentType]
    try:
        yield state
    finally:
        handle.remove()


@contextmanager
def _scoring_head(
    model: nn.Module,
    places: tuple[torch.Tensor, torch.Tensor],
    shape: torch.Size,
    tokens: torch.Tensor,
    options: ForwardOptions,
    precomputed: PrecomputedGradient | None,
) -> Iterator[NarrowedHead]:
    """Narrows the output head to `places` and computes the scores of `tokens` there if the head can be tiled.

    With the tiled head the module itself gets one token for form's sake. Where parameters are sharded over ranks the
    scores are the module's output, so that its weights are gathered for their backward pass as for any module's.
    """
    head = output_head(model)
    transform = logit_transform(unwrap(model)) if options.tiled_head else None
    if transform is not None and is_sharded(model) and not isinstance(head, nn.Linear):
        transform = None  # an adapter's module around the weights gathers nothing
    if transform is None or head is None or not places[0].numel():
        with narrowed_head(model, places, shape) as state:
            yield state
        return
    score = partial(_tiled, tokens=tokens, transform=transform, options=options, precomputed=precomputed)

    def compute(module: nn.Module, hidden: torch.Tensor, state: NarrowedHead) -> torch.Tensor:
        state.scores = score(module, hidden)
        return hidden[:1]

    is_inside = is_sharded(model)
    with (
        narrowed_head(model, places, shape, None if is_inside else compute) as state,
        _scoring_inside(head, state, partial(score, head), options) if is_inside else nullcontext(),
    ):
        yield state


@contextmanager
def _scoring_inside(
    head: Any, seen: NarrowedHead, score: Callable[[torch.Tensor], TokenScores], options: ForwardOptions
) -> Iterator[None]:
    """Let the head give the scores of the hidden states that it was narrowed to, in place of logits.

    What a module gives and takes is what tells ZeRO when its weights are needed, forward and backward. The model behind
    it goes on with zeros for one token's logits.
    """
    plain = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not seen.narrowed:
            return plain(hidden)
        scores = score(hidden[0])
        return torch.stack([scores.logprobs, scores.entropy])

    def take(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        if not seen.narrowed:
            return None
        logprobs, entropy = output.unbind()
        seen.scores = TokenScores(logprobs, entropy if options.entropy_gradient else entropy.detach())
        return inputs[0].new_zeros(1, 1, head.out_features)

    handle = head.register_forward_hook(take)
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        handle.remove()


def _tiled(
    head: Any,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    transform: LogitTransform,
    options: ForwardOptions,
    precomputed: PrecomputedGradient | None,
) -> TokenScores:
    layer = head_layer(head)
    assert layer is not None  # there is a recipe
    weight, bias, low_rank = layer.linear.weight, layer.linear.bias, layer.low_rank(hidden)
    arguments: dict[str, Any] = {"transform": transform, "temperature": options.temperature, "low_rank": low_rank}
    if precomputed is None or options.entropy_gradient:
        arguments["entropy_gradient"] = options.entropy_gradient
        scores = tiled_scores(hidden, weight, bias, tokens, **arguments)
    else:
        scores = scores_with_gradient(hidden, weight, bias, tokens, precomputed, **arguments)
    device = tokens.device
    return TokenScores(scores.logprobs.to(device).float(), scores.entropy.to(device).float())


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that turns hidden states into logits, adapters included; None if the model names none."""
    inner = unwrap(model)
    getter = getattr(inner, "get_output_embeddings", None)
    return getter() if getter is not None else None


def unwrap(model: nn.Module) -> nn.Module:
    """The model under wrappers for data parallelism and compilation."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None and type(model).__name__ == "DeepSpeedEngine":
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _scores(
    logits: torch.Tensor, tokens: torch.Tensor, options: ForwardOptions, aux_loss: torch.Tensor | None
) -> TokenScores:
    logits = logits.float()
    if options.temperature != 1.0:
        logits = logits / options.temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, tokens[:, None]).squeeze(-1) - normaliser
    with torch.set_grad_enabled(options.entropy_gradient and torch.is_grad_enabled()):
        source, lse = (logits, normaliser) if options.entropy_gradient else (logits.detach(), normaliser.detach())
        parts = [
            lse[i : i + ENTROPY_TOKENS] - (_probabilities(source, lse, i) * source[i : i + ENTROPY_TOKENS]).sum(-1)
            for i in range(0, max(len(tokens), 1), ENTROPY_TOKENS)
        ]
        entropy = torch.cat(parts)
    return TokenScores(logprobs=logprobs, entropy=entropy, aux_loss=aux_loss)


def _probabilities(logits: torch.Tensor, normaliser: torch.Tensor, start: int) -> torch.Tensor:
    end = start + ENTROPY_TOKENS
    return (logits[start:end] - normaliser[start:end, None]).exp()
