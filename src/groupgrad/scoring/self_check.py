"""Start-up checks of the user's model: is its attention causal, which layout gives the dense log-probs, and does it
have a load-balancing loss?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from groupgrad.batch import Batch
from groupgrad.errors import UnavailableError
from groupgrad.models.shards import is_sharded
from groupgrad.models.unwrapping import base_model, is_multimodal, output_head, placeholder_ids, unwrap
from groupgrad.scoring.attention import flat_obstacle
from groupgrad.scoring.forward import ForwardOptions, InputLayout, build_batch, evaluation_mode, score_tokens
from groupgrad.scoring.fused_modules import compiled_parts
from groupgrad.scoring.logit_transform import head_layer, logit_transform
from groupgrad.scoring.rounding import TOLERANCE_FLOAT32, Rounding
from groupgrad.types import Prompt

TOLERANCE_HALF_BALANCE = 0.02
"""Relative error allowed for the load-balancing loss in half precision, where rounding may reroute tokens."""

_PROMPT_LENGTHS, _ROWS = (7, 12), ((0, 5), (1, 8), (0, 11), (1, 3), (0, 1))
"""Prompt lengths, and (prompt, completion length) of each row."""

_COPIES_ON_GPU = 8
"""Repetitions of these prompts and rows on a GPU, where short inputs would run other kernels than long ones."""

_LENGTHS_WITH_IMAGES = (4, 2)
"""Completion lengths of the rows that continue an example prompt with images."""

_NUM_CAUSAL, _NUM_APPENDED = 9, 4
"""Random tokens that `check_causal` compares, and tokens appended to them in its second pass."""


_NUM_LOGITS = 16
"""Tokens whose logits are compared with the output head's."""

_LOGITS_FLOAT32 = 1e-4
"""Largest difference of logits that two orders of the same additions make in float32, relative to the largest logit."""


@dataclass(slots=True, frozen=True)
class LayoutReport:
    """The layout in which a model is run, and the reason."""

    layout: InputLayout
    tiled_head: bool
    """The output head is computed in tiles."""
    reason: str | None
    """Why this is not the shared layout with a tiled head; None if it is."""
    difference: float | None
    """Nats between its log-probs and the plain dense ones on random tokens; None if they were not compared."""
    weighs_balance: bool = False
    """The load-balancing loss is right for prompts that are computed once for several rows."""

    def options(self, options: ForwardOptions) -> ForwardOptions:
        """`options` for a model with this report."""
        return replace(
            options,
            layout="dense" if self.layout == "dense" else None,
            tiled_head=self.tiled_head,
            weighs_balance=self.weighs_balance,
        )


def check_layout(
    model: nn.Module,
    options: ForwardOptions,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    example: Prompt | None = None,
) -> LayoutReport:
    """Finds the fastest layout and head that give the log-probs of the plain dense pass on random tokens.

    A VLM is also run on the images of `example`, a prompt made by the user's processor. What that raises goes on.
    Random streams, module modes and gradients stay as they are.
    """
    # A low temperature multiplies rounding, and nothing else, so layouts are compared without one.
    options, rounding, obstacle = replace(options, temperature=1.0), Rounding.of(model, precision), flat_obstacle(model)
    batch = random_batch(model, example, has_part=True)
    reasons, difference = [] if obstacle is None else [obstacle], None
    candidates: list[tuple[InputLayout, bool]] = [("shared", True), ("shared", False), ("dense", True)]
    with torch.no_grad(), evaluation_mode(model), precision():
        with _HeadCall.of(model) as head_call:
            expected = score_tokens(model, batch, replace(options, layout="dense", tiled_head=False, aux_loss=False))
        problem = head_call.problem(model, rounding)
        can_tile = problem is None
        reasons += [] if problem is None else [problem]
        for layout, tiled_head in candidates:
            if (tiled_head and not can_tile) or (layout != "dense" and obstacle is not None):
                continue
            name = f"{layout} layout with the {'tiled' if tiled_head else 'plain'} head"
            try:
                candidate = replace(options, layout=layout, tiled_head=tiled_head, aux_loss=False)
                scores = score_tokens(model, batch, candidate)
                difference = rounding.gap(scores.logprobs, expected.logprobs)
            except Exception as error:  # model code may raise anything; the dense layout remains
                reasons.append(f"the {name} failed: {type(error).__name__}: {error}")
                continue
            if difference <= rounding.tolerance:
                balance = layout == "shared" and options.aux_loss and _weighs_balance(model, batch, options)
                return LayoutReport(layout, tiled_head, "; ".join(reasons) or None, difference, balance)
            reasons.append(f"log-probs of the {name} differ by {difference:.2g} nats on random tokens")
    return LayoutReport("dense", False, "; ".join(reasons), difference)


@dataclass(slots=True)
class _HeadCall:
    """What the output head got in a pass, and the logits that the model returned."""

    states: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    @classmethod
    @contextmanager
    def of(cls, model: nn.Module) -> Iterator[_HeadCall]:
        """The last call inside."""
        call, head = cls(), output_head(model)

        def keep_states(_module: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
            call.states = inputs[0]

        def keep_logits(_module: nn.Module, _inputs: Any, output: Any) -> None:
            call.logits = getattr(output, "logits", None)

        with (
            nullcontext() if head is None else head.register_forward_hook(keep_states),
            model.register_forward_hook(keep_logits),
        ):
            yield call

    def problem(self, model: nn.Module, rounding: Rounding) -> str | None:
        """Why the head cannot be computed in tiles, or None.

        Hooks, a replaced `forward` and subclasses change logits where no configuration says so. Few of them may change,
        so all logits of some tokens are compared, not only those of sampled tokens.
        """
        transform, layer = logit_transform(unwrap(model)), head_layer(output_head(model))
        if transform is None or layer is None:
            return "it is not known what the model makes of its output head"
        if self.states is None:
            return "it multiplies with its output head's weight itself"
        if is_sharded(model) or self.logits is None:
            return None  # the weight is gathered for the head's call alone
        states, logits = (x.flatten(0, -2)[:_NUM_LOGITS] for x in (self.states, self.logits))
        expected = layer.output_head(states).output(states).float() * transform.scale
        if transform.softcap is not None:
            expected = transform.softcap * torch.tanh(expected / transform.softcap)
        # A model that lies on several devices returns its logits on the first one.
        expected = expected.to(logits.device)
        apart = (logits.float() - expected).abs().max() if logits.shape == expected.shape else math.inf
        if float(apart) <= max(_LOGITS_FLOAT32, 2 * rounding.eps) * float(expected.abs().max()):
            return None
        return "code changes its logits behind the output head, in a way that its configuration does not say"


@torch.no_grad()
def check_causal(model: nn.Module, precision: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """UnavailableError if tokens appended to a text change the model's logits for the text.

    Encoders fail this test, although transformers loads some of them as causal language models. For all other models it
    shows that padding on the right, as in the dense layout, does not change a row. Module modes stay as they are.
    """
    generator = torch.Generator().manual_seed(2)
    ids = random_ids(model, _NUM_CAUSAL + _NUM_APPENDED, generator).to(next(model.parameters()).device)
    with evaluation_mode(model), precision(), compiled_parts(model, is_dense=True):
        # An adapter may put virtual tokens in front, so the rows are counted from the end.
        alone, followed = (
            model(input_ids=part[None], use_cache=False).logits[0, -len(part) :].float().log_softmax(dim=-1)
            for part in (ids[:_NUM_CAUSAL], ids)
        )
    rounding = Rounding.of(model, precision)
    difference = rounding.gap(followed[:_NUM_CAUSAL], alone)
    if difference > rounding.tolerance:
        raise UnavailableError(
            f"{type(base_model(unwrap(model))).__name__} looks to the right: more tokens behind a text change what it "
            f"says of the text, by {difference:.2g} nats a token, as in an encoder. groupgrad trains decoder-only "
            "language models, in which a token sees those before it; of some encoders the config's is_decoder=True "
            "makes one"
        )


def random_batch(model: nn.Module, example: Prompt | None = None, *, has_part: bool = False) -> Batch:
    """A small ragged batch of random token ids on the model's device.

    With `has_part` one more row continues only the first tokens of a prompt that others continue as a whole. For a VLM
    some rows continue `example`, a prompt with images, and contain a placeholder that stands for no image.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    copies = _copies(device)
    prompt_lengths, lengths = list(_PROMPT_LENGTHS) * copies, [length for _, length in _ROWS] * copies
    prompt_of_row = [prompt + copy * len(_PROMPT_LENGTHS) for copy in range(copies) for prompt, _ in _ROWS]
    ids = random_ids(model, sum(lengths) + sum(prompt_lengths), generator).split([*lengths, *prompt_lengths])
    completions, prompts = ([row.tolist() for row in part] for part in (ids[: len(lengths)], ids[len(lengths) :]))
    if has_part:
        prompt_of_row.append(len(prompts))
        prompts.append(prompts[0][:-2])
        completions.append(completions[0])
    media = None
    if example is not None and example.media is not None and is_multimodal(model):
        vocab_size = _text_config(model).vocab_size
        placeholder = [token for token in placeholder_ids(model) if token < vocab_size][:1]
        for row in random_ids(model, sum(_LENGTHS_WITH_IMAGES), generator).split(list(_LENGTHS_WITH_IMAGES)):
            completions.append([*row.tolist(), *placeholder, int(row[0])])
            prompt_of_row.append(len(prompts))
        media = (*[None] * len(prompts), example.media)
        prompts.append(example.ids)
    return build_batch(prompts, prompt_of_row, completions, media).to(device)


def _copies(device: torch.device) -> int:
    return _COPIES_ON_GPU if device.type == "cuda" else 1


def _text_config(model: nn.Module) -> Any:
    inner: Any = unwrap(model)
    return inner.config.get_text_config()


def random_ids(model: nn.Module, count: int, generator: torch.Generator) -> torch.Tensor:
    """(count,) random ids of the model's vocabulary, without the padding token and placeholders of images."""
    config = _text_config(model)
    pad = getattr(config, "pad_token_id", None)
    ids = torch.randint(0, config.vocab_size, (count,), generator=generator)
    # Some models warn about a missing mask when they find the padding token.
    special = torch.tensor([-1 if pad is None else pad, *placeholder_ids(model)])
    while bool((is_special := torch.isin(ids, special)).any()):
        ids = torch.where(is_special, (ids + 1) % config.vocab_size, ids)
    return ids


def reversed_prompts(batch: Batch) -> Batch:
    """The batch with each prompt's tokens reversed, so that it shares no prompt with the original."""
    bounds = batch.prompt_offsets.tolist()
    reversed_ids = [batch.prompt_ids[a:b].flip(0) for a, b in pairwise(bounds)]
    return replace(batch, prompt_ids=torch.cat(reversed_ids))


def _weighs_balance(model: nn.Module, batch: Batch, options: ForwardOptions) -> bool:
    """True if the load-balancing loss with shared prompts, each weighted by its rows, equals the unshared one."""
    try:
        packed, shared = (
            score_tokens(model, batch, replace(options, layout=layout, aux_loss=True)).aux_loss
            for layout in ("packed", "shared")
        )
    except Exception:  # model code may raise anything; the packed layout remains
        return False
    if packed is None or shared is None:
        return False
    relative = TOLERANCE_HALF_BALANCE if Rounding.of(model).is_half else TOLERANCE_FLOAT32
    return bool((shared - packed).abs() <= relative * packed.abs())


def configured_aux_loss_weight(model: Any, requested: float | None) -> float:
    """The weight that the user requested, else the model config's; 0 for models without routed experts.

    ValueError if a weight is requested for a model without routed experts.
    """
    text = model.config.get_text_config() if hasattr(getattr(model, "config", None), "get_text_config") else None
    # Granite 4's small models have the configuration of a mixture of experts, with none.
    has_router = hasattr(text, "output_router_logits") and getattr(text, "num_local_experts", None) != 0
    if requested is None:
        return float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0) if has_router else 0.0
    if requested and not has_router:
        raise ValueError(
            f"router_aux_loss_coef={requested}, but {type(model).__name__} tells of no routed experts to balance; "
            "leave it out or set it to 0"
        )
    return float(requested)


def effective_aux_loss_weight(
    model: nn.Module,
    options: ForwardOptions,
    weight: float,
    requested: float | None,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """`weight`, or 0 for a model that returns no load-balancing loss on random tokens.

    Many configs have a weight for a loss that their model never computes. ValueError if the user requested a weight for
    such a model. Random streams, module modes and gradients stay as they are.
    """
    if weight == 0.0:
        return 0.0
    aux_loss = None
    try:
        with torch.no_grad(), evaluation_mode(model), precision():
            batch = random_batch(model)
            aux_loss = score_tokens(model, batch, replace(options, layout="dense", aux_loss=True)).aux_loss
    except TypeError:  # the forward method has no parameter `output_router_logits`
        pass
    if aux_loss is not None and float(aux_loss) > 0.0:
        return weight
    if requested:
        raise ValueError(
            f"router_aux_loss_coef={requested}, but {type(base_model(unwrap(model))).__name__} computes no "
            "load-balancing loss, whatever its configuration says; leave router_aux_loss_coef out or set it to 0"
        )
    return 0.0
