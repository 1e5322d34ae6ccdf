"""Numbers of a model that decide its memory, from its configuration alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from groupgrad.engines.native.attention_plans import ProbePlan
from groupgrad.engines.native.logits import last_logits
from groupgrad.modeling.load import max_context
from groupgrad.modeling.model_names import missing_because
from groupgrad.modeling.scoring.forward import ForwardOptions, build_batch
from groupgrad.modeling.systems.checkpointing import activation_bytes_per_token

_SMALL_HIDDEN, _SMALL_VOCAB = 1024, 512
"""Sizes of the copies on which activations are measured."""

_PROMPT, _COMPLETION = 32, 64
"""Tokens of the prompt and of each completion on which activations of hybrids are measured."""

_HEADS = (
    *("num_attention_heads", "num_key_value_heads", "num_heads", "mamba_num_heads", "mamba_n_heads"),
    *("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"),
)
_WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "mamba_d_ssm"),
)
_GROUPS = ("n_groups", "mamba_n_groups")
"""Fields that a copy has divided by a factor, beside the hidden size: numbers of heads, whose own sizes stay, widths,
which are rounded up, and groups of heads where they can be divided."""


@dataclass(slots=True, frozen=True)
class ModelShape:
    """Counts of parameters, and bytes per token."""

    name: str
    parameters: int
    layers: int
    layer_parameters: int
    """Parameters of the largest layer."""
    head_parameters: int
    """Parameters of the output head."""
    largest_parameter: int
    """Numbers of the largest weight."""
    linear_parameters: int
    """Parameters of linear layers within the layers; these can be quantized."""
    adapter_inputs: int
    """Inputs and outputs of all these linear layers together: parameters of an adapter of rank 1."""
    hidden: int
    kv_values: int
    """Numbers of one token's keys and values, in all layers."""
    layer_kv_values: int
    """The same of the layer that has the most."""
    state_bytes: int
    """Bytes of the states of one sequence in all recurrent layers; 0 for a model without any."""
    context: int | None
    """Most positions of prompt and completion together; None without a limit."""
    layer_bytes: float
    """Bytes of activations that a layer saves per token, of the kind that saves most."""
    all_layers_bytes: float
    """Bytes of activations that all layers together save per token."""
    other_bytes: float
    """Bytes of activations per token outside of the layers."""


@dataclass(slots=True, frozen=True)
class _Costs:
    """Memory that a small copy takes, or one of its layers."""

    saved: float
    """Bytes of activations per token."""
    kv_values: int
    """Numbers of a token's keys and values."""
    state_bytes: int
    """Bytes of a sequence's recurrent states."""

    def less(self, other: _Costs) -> _Costs:
        """The difference of two copies."""
        return _Costs(self.saved - other.saved, self.kv_values - other.kv_values, self.state_bytes - other.state_bytes)


def read_config(name: str) -> Any:
    """Loads a configuration from a folder, a config.json or the hub's cache. ValueError with what to give instead."""
    wanted = "give a folder with a config.json, or a config.json"
    if (why := missing_because(name)) is not None:
        raise ValueError(f"--model {name}: {why}; {wanted}")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {name}: {str(error).splitlines()[0].rstrip('.')}; {wanted}") from error


def model_shape(name: str, config: Any, *, half: bool) -> ModelShape:
    """Counts a model on the meta device, and measures the activations, keys, values and states of small copies of it.

    Kinds of layers are those that the configuration lists in `layer_types`. With `half` the activations are those of
    autocast in bfloat16. ValueError for an architecture whose layers cannot be chosen by its configuration.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    layers = _decoder_layers(model, text.num_hidden_layers)
    if layers is None:
        raise ValueError(f"{name}: {type(model).__name__} has layers of a kind that is not predicted yet")
    linear = [part for part in layers.modules() if isinstance(part, torch.nn.Linear)]
    kinds = list(getattr(text, "layer_types", None) or [""] * len(layers))
    try:
        costs, other = _costs(text, kinds, half=half)
    except (AttributeError, IndexError, ValueError) as error:
        raise ValueError(
            f"{name}: {type(model).__name__} has layers of a kind that is not predicted yet (no small copy can be "
            f"measured: {error})"
        ) from error
    of_layers = [costs[kind] for kind in kinds]
    return ModelShape(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=len(layers),
        layer_parameters=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        head_parameters=head.weight.numel() if (head := model.get_output_embeddings()) is not None else 0,
        largest_parameter=max(p.numel() for p in model.parameters()),
        linear_parameters=sum(part.weight.numel() for part in linear),
        adapter_inputs=sum(part.in_features + part.out_features for part in linear),
        hidden=text.hidden_size,
        kv_values=sum(layer.kv_values for layer in of_layers),
        layer_kv_values=max(layer.kv_values for layer in of_layers),
        state_bytes=sum(layer.state_bytes for layer in of_layers),
        context=max_context(model),
        layer_bytes=max(layer.saved for layer in of_layers),
        all_layers_bytes=sum(layer.saved for layer in of_layers),
        other_bytes=other,
    )


def _decoder_layers(model: Any, count: int) -> torch.nn.ModuleList | None:
    """The `count` layers of the text decoder; None if they do not lie in one list."""
    lists = (m for m in (model.get_decoder() or model).modules() if isinstance(m, torch.nn.ModuleList))
    return next((found for found in lists if len(found) == count), None)


def _costs(text: Any, kinds: list[str], *, half: bool) -> tuple[dict[str, _Costs], float]:
    """The costs of a layer of each kind, and the bytes of activations per token outside of the layers.

    A layer costs what a copy with one more of its kind takes more than the copy with one of each kind. No copy lacks a
    kind, since a hybrid without recurrent layers is computed in another way.
    """
    factor, each = _factor(text), list(dict.fromkeys(kinds))
    base = _measured(text, each, factor, half=half)
    costs = {kind: _measured(text, [*each, kind], factor, half=half).less(base) for kind in each}
    return costs, max(0.0, base.saved - sum(layer.saved for layer in costs.values()))


def _sizes(text: Any, fields: Sequence[str]) -> dict[str, int]:
    """The numbers that the configuration has in these fields."""
    found = {field: getattr(text, field, None) for field in fields}
    return {field: size for field, size in found.items() if isinstance(size, int) and size > 0}


def _factor(text: Any) -> int:
    """The factor by which sizes are divided in the copies: a power of 2 that divides the hidden size and all heads."""
    factor, sizes = 1, [text.hidden_size, *_sizes(text, _HEADS).values()]
    while text.hidden_size // factor > _SMALL_HIDDEN and all(size % (2 * factor) == 0 for size in sizes):
        factor *= 2
    return factor


def _narrow_sizes(text: Any, factor: int) -> dict[str, int]:
    """The fields of a copy that is narrower by `factor`. Widths stay multiples of 8, as products of experts need."""
    sizes = {field: size // factor for field, size in _sizes(text, ("hidden_size", *_HEADS)).items()}
    sizes |= {field: -(-size // (8 * factor)) * 8 for field, size in _sizes(text, _WIDTHS).items()}
    return sizes | {field: size // factor for field, size in _sizes(text, _GROUPS).items() if size % factor == 0}


def _measured(text: Any, kinds: list[str], factor: int, *, half: bool) -> _Costs:
    """The costs of a copy with layers of these kinds, scaled to the model's sizes."""
    small = _copy_of(text, kinds, factor)
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        if len(_decoder_layers(model, len(kinds)) or ()) != len(kinds):
            raise ValueError(f"its configuration does not make {len(kinds)} layers")
        probe, token = ProbePlan(), torch.zeros(1, dtype=torch.int64)
        with torch.no_grad():
            last_logits(model.eval(), token, token, probe, token)
        # Short rows do for layers without a state.
        batch = build_batch([list(range(_PROMPT))], [0, 0], [[0] * _COMPLETION] * 2) if probe.states else None
        saved = activation_bytes_per_token(model.train(), ForwardOptions(), batch)
    values = sum(layer.num_heads * (layer.key_dim + layer.value_dim) for layer in probe.layers.values())
    states = sum(state.num_bytes for state in probe.states)
    return _Costs(saved * factor, values * factor, states * factor)


def _copy_of(text: Any, kinds: list[str], factor: int) -> Any:
    """The configuration of a copy with a small vocabulary, whose layers are of these kinds and narrower by `factor`."""
    small = copy.deepcopy(text)
    if getattr(small, "num_attention_heads", None) and not getattr(small, "head_dim", None):
        small.head_dim = text.hidden_size // text.num_attention_heads
    if factor > 1:
        for field, size in _narrow_sizes(text, factor).items():
            setattr(small, field, size)
    if getattr(small, "layer_types", None) != kinds:
        if hasattr(small, "attn_layer_indices"):  # Bamba derives the kinds of its layers from this list
            small.attn_layer_indices = [place for place, kind in enumerate(kinds) if kind == "full_attention"]
        elif any(kinds) and len(set(text.layer_types)) > 1:
            small.layer_types = list(kinds)
    if small.num_hidden_layers != len(kinds):
        small.num_hidden_layers = len(kinds)
    small.vocab_size = _SMALL_VOCAB
    for field in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(small, field, None)
    return small
