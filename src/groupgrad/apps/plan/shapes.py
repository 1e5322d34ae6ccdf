"""Numbers of a model that decide its memory, from its configuration alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D

from groupgrad.engines.native.attention_layouts import ProbeLayout
from groupgrad.engines.native.logits import last_logits
from groupgrad.models.families import common_field, layer_configs, layer_overrides
from groupgrad.models.load import max_context
from groupgrad.models.model_names import check_gguf_file, missing_because
from groupgrad.scoring.attention import flat_obstacle
from groupgrad.scoring.forward import ForwardOptions, build_batch
from groupgrad.scoring.gradient_checkpointing import activation_bytes_per_token

_SMALL_HIDDEN, _SMALL_VOCAB = 1024, 512
"""Sizes of the copies on which activations are measured."""

_PROMPT, _COMPLETION = 32, 64
"""Tokens of the prompt and of each completion on which activations of hybrids are measured."""

_HEADS = (
    *("num_attention_heads", "num_heads", "mamba_num_heads", "mamba_n_heads"),
    *("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"),
)
"""Fields with numbers of heads, which narrow copies divide; the sizes of a head stay."""

_GROUPS = ("num_key_value_heads", "n_groups", "mamba_n_groups")
"""Fields with numbers of groups of heads, which narrow copies divide where they can."""

_WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "mamba_d_ssm", "hidden_size_per_layer_input"),
)
"""Fields with other widths, which narrow copies divide and round up."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_k")
"""Fields with the number of experts of a layer, and of a token. Copies have few experts: a token computes no others."""


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
    largest_linear: int
    """Parameters of the largest of these linear layers."""
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
    text: Any
    """Configuration of the text decoder."""


_Kind = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a layer's parameters."""


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


def read_config(name: str, gguf_file: str | None = None) -> Any:
    """Loads a configuration from a folder, a config.json or the hub's cache. ValueError with what to give instead.

    With `gguf_file` it is read from the head of that file, of which the folder may have nothing else.
    """
    wanted = "give a folder with a config.json, or a config.json"
    if (why := missing_because(name)) is not None:
        raise ValueError(f"--model {name}: {why}; {wanted}")
    file = {"gguf_file": gguf_file} if gguf_file else {}
    check_gguf_file("model", name, gguf_file)
    try:
        return AutoConfig.from_pretrained(name, **file)
    except Exception as error:  # configurations check themselves in many ways
        raise ValueError(f"--model {name}: {_first_line(error)}; {wanted}") from error


def model_shape(name: str, config: Any, *, half: bool) -> ModelShape:
    """Counts a model on the meta device, and measures the activations, keys, values and states of small copies of it.

    With `half` the activations are those of autocast in bfloat16. ValueError, with the reason, for an architecture that
    transformers has no causal language model of, or whose layers cannot be measured one by one.
    """
    if has_tower(config) and type(config) not in AutoModelForImageTextToText._model_mapping:
        raise ValueError(
            f"{name}: models of type {config.model_type!r} have a text decoder beside parts for other things than "
            "images; plan for a text model of the same sizes"
        )
    try:
        return _shape(name, config, half=half)
    except Exception as error:  # model files fail in many ways on configurations that they do not expect
        raise ValueError(
            f"{name}: models of type {config.model_type!r} have layers of a kind that is not predicted yet, or this "
            f"configuration does not make one ({type(error).__name__}: {_first_line(error)})"
        ) from error


def has_tower(config: Any) -> bool:
    """Returns True for a model that has a text decoder beside other parts, such as a vision tower."""
    return config.get_text_config() is not config


def _first_line(error: Exception) -> str:
    """The first line without its full stop; of a long one the sentences that are whole, or its beginning."""
    line = (str(error).splitlines() or [""])[0].rstrip(".")
    if len(line) <= 200:
        return line
    sentences = line[:200].rpartition(". ")[0]
    return sentences or f"{line[:200]} ..."


def _shape(name: str, config: Any, *, half: bool) -> ModelShape:
    text, model = config.get_text_config(), _meta_model(config)
    layers = _decoder_layers(model, text.num_hidden_layers)
    linear = [part for part in layers.modules() if isinstance(part, (torch.nn.Linear, Conv1D))]
    kinds = [_kind(layer) for layer in layers]
    costs, other = _costs(config, kinds, half=half)
    of_layers = [costs[kind] for kind in kinds]
    return ModelShape(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=len(layers),
        layer_parameters=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        head_parameters=head.weight.numel() if (head := model.get_output_embeddings()) is not None else 0,
        largest_parameter=max(p.numel() for p in model.parameters()),
        linear_parameters=sum(part.weight.numel() for part in linear),
        largest_linear=max((part.weight.numel() for part in linear), default=0),
        adapter_inputs=sum(sum(part.weight.shape) for part in linear),
        hidden=text.hidden_size,
        kv_values=sum(layer.kv_values for layer in of_layers),
        layer_kv_values=max(layer.kv_values for layer in of_layers),
        state_bytes=sum(layer.state_bytes for layer in of_layers),
        context=max_context(model),
        layer_bytes=max(layer.saved for layer in of_layers),
        all_layers_bytes=sum(layer.saved for layer in of_layers),
        other_bytes=other,
        text=text,
    )


def _meta_model(config: Any) -> Any:
    """The whole model, without memory for its weights."""
    kind: Any = AutoModelForImageTextToText if has_tower(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


def _decoder_layers(model: Any, count: int) -> torch.nn.ModuleList:
    """The `count` layers of the text decoder. ValueError if they do not lie in one list."""
    lists = (m for m in (model.get_decoder() or model).modules() if isinstance(m, torch.nn.ModuleList))
    found = next((found for found in lists if len(found) == count), None)
    if not found:
        raise ValueError(f"there is no list of {count} layers in {type(model).__name__}")
    return found


def _kind(layer: torch.nn.Module) -> _Kind:
    """Layers with the same parameters are of one kind, such as those with attention, a state, or experts."""
    return tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


def _costs(config: Any, kinds: list[_Kind], *, half: bool) -> tuple[dict[_Kind, _Costs], float]:
    """The costs of a layer of each kind, and the bytes of activations per token outside of the layers.

    The cost of a kind is the difference of two copies: one with a layer of each kind, and one with a further layer of
    that kind. No copy lacks a kind, since a hybrid without recurrent layers is computed in another way.
    """
    factor, each = _factor(config.get_text_config()), [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    base = _measured(config, each, factor, half=half)
    costs = {kinds[place]: _measured(config, sorted([*each, place]), factor, half=half).less(base) for place in each}
    return costs, max(0.0, base.saved - sum(layer.saved for layer in costs.values()))


def _sizes(text: Any, fields: Sequence[str]) -> dict[str, int]:
    """The numbers that the configuration has in these fields."""
    found = {field: common_field(text, field) for field in fields}
    return {field: size for field, size in found.items() if isinstance(size, int) and size > 0}


def _factor(text: Any) -> int:
    """The factor by which sizes are divided in the copies: a power of 2 that divides the hidden size and all heads."""
    factor, sizes = 1, [text.hidden_size, *_sizes(text, _HEADS).values()]
    sizes += [size for fields in layer_overrides(text).values() for field, size in fields.items() if field in _HEADS]
    while text.hidden_size // factor > _SMALL_HIDDEN and all(size % (2 * factor) == 0 for size in sizes):
        factor *= 2
    return factor


def _measured(config: Any, places: list[int], factor: int, *, half: bool) -> _Costs:
    """The costs of a copy with the layers at these places, scaled to the model's sizes."""
    text = config.get_text_config()
    precision = torch.autocast("cpu", torch.bfloat16) if half else nullcontext()
    with precision:
        model = _copy_with(_small_config(text, factor), places, config)
        probe, token = ProbeLayout(), torch.zeros(1, dtype=torch.int64)
        if flat_obstacle(model) is None:
            with torch.no_grad():
                last_logits(model.eval(), token, token, probe, token)
        elif getattr(model, "_is_stateful", False):
            raise ValueError(f"{type(model).__name__} carries a state: {flat_obstacle(model)}")
        # Short rows do for layers without a state.
        batch = build_batch([list(range(_PROMPT))], [0, 0], [[0] * _COMPLETION] * 2) if probe.states else None
        saved = activation_bytes_per_token(model.train(), ForwardOptions(), batch)
    layers = layer_configs(text)
    if flat_obstacle(model) is None:
        values = 0
        for number, stored in probe.layers.items():
            is_divided = _num_key_heads(layers[places[number]]) % factor == 0
            values += stored.bytes_per_token // stored.dtype.itemsize * (factor if is_divided else 1)
    else:
        values = sum(2 * _num_key_heads(layers[place]) * _head_size(layers[place]) for place in places)
    return _Costs(saved * factor, values, sum(state.num_bytes for state in probe.states) * factor)


def _num_key_heads(layer: Any) -> int:
    return getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", 0)


def _head_size(layer: Any) -> int:
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def _small_config(text: Any, factor: int) -> Any:
    """The configuration of a copy that is narrower by `factor`, with a small vocabulary and few experts."""
    small, overrides = copy.deepcopy(text), layer_overrides(text)
    if factor > 1:
        if not overrides and getattr(small, "num_attention_heads", None) and not getattr(small, "head_dim", None):
            small.head_dim = _head_size(text)
        for fields in overrides.values():
            fields |= {field: size // factor for field, size in fields.items() if field in _HEADS}
            fields |= {f: size // factor for f, size in fields.items() if f in _GROUPS and size % factor == 0}
        sizes = {field: size // factor for field, size in _sizes(text, ("hidden_size", *_HEADS)).items()}
        # Products of experts need multiples of 8.
        sizes |= {field: -(-size // (8 * factor)) * 8 for field, size in _sizes(text, _WIDTHS).items()}
        sizes |= {field: size // factor for field, size in _sizes(text, _GROUPS).items() if size % factor == 0}
        for field, size in sizes.items():
            setattr(small, field, size)
        if overrides:
            small.per_layer_config = overrides
    if (chosen := max(_sizes(text, _CHOSEN_EXPERTS).values(), default=0)) > 0:
        for field, size in _sizes(text, _EXPERTS).items():
            setattr(small, field, min(size, 2 * chosen))
        for field in _sizes(text, ("n_group", "topk_group")):
            setattr(small, field, 1)
    for field in _sizes(text, ("vocab_size", "vocab_size_per_layer_input")):
        setattr(small, field, _SMALL_VOCAB)
    for field in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(small, field, None)
    return small


def _copy_with(text: Any, places: list[int], config: Any) -> Any:
    """A float32 text model of zeros that has only the layers at these places. A place that is named again is copied.

    `config` is the configuration of the whole model, of which `text` is the part that describes the text decoder.
    """
    if getattr(text, "hidden_size_per_layer_input", None) is not None:
        text, places = _of_layers(text, places), list(range(len(places)))
    with torch.device("meta"):
        model = _text_model(text, config)
    layers = _decoder_layers(model, text.num_hidden_layers)
    chosen = [copy.deepcopy(layers[place]) for place in places]
    for number, layer in enumerate(chosen):
        for module in layer.modules():
            for field in ("layer_idx", "layer_id"):
                if hasattr(module, field):
                    setattr(module, field, number)
    del layers[:]
    layers.extend(chosen)
    for inner in {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values():
        _choose_layers(inner, places)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def _text_model(text: Any, config: Any) -> Any:
    """A float32 model with this text decoder, which cannot read images.

    Where transformers has no language model of the decoder alone (Qwen2.5-VL), the whole model without its other parts.
    """
    if type(text) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM.from_config(text, dtype=torch.float32)
    config = copy.deepcopy(config)
    config.text_config = text
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, part in model.base_model.named_children():
        if part is not model.get_decoder():
            setattr(model.base_model, name, torch.nn.Identity())
    return model


def _of_layers(config: Any, places: list[int]) -> Any:
    """A configuration of these layers alone, for families whose embeddings have a part for each layer (Gemma 4).

    The configuration describes each of their layers. Layers that share keys and values must come last in `places`.
    """
    chosen, overrides = copy.deepcopy(config), layer_overrides(config)
    first_shared = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    if overrides:
        chosen.per_layer_config = None
    for field, values in vars(config).items():
        if isinstance(values, list) and len(values) == config.num_hidden_layers:
            setattr(chosen, field, [values[place] for place in places])
    chosen.num_hidden_layers = len(places)
    chosen.num_kv_shared_layers = sum(place >= first_shared for place in places)
    if overrides:
        chosen.per_layer_config = {i: overrides[place] for i, place in enumerate(places)}
    return chosen


def _choose_layers(config: Any, places: list[int]) -> None:
    """Leaves only these layers in a configuration, also where it derives their kinds from other fields."""
    kinds = {field: getattr(config, field, None) for field in ("layer_types", "layers_block_type")}
    values = {field: [found[place] for place in places] for field, found in kinds.items() if isinstance(found, list)}
    derived = {}
    for field, value in {**values, "num_hidden_layers": len(places)}.items():
        try:
            setattr(config, field, value)
        except AttributeError:
            derived[field] = value
    config.__class__ = type(type(config).__name__, (type(config),), derived)
