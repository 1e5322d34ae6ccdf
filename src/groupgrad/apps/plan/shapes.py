"""Numbers of a model that decide its memory, from its configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D

from groupgrad.models.families import layer_configs
from groupgrad.models.load import max_context
from groupgrad.models.model_names import check_gguf_file, missing_because

_KEYS = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"})
_STATES = frozenset({"linear_attention", "mamba", "hybrid", "hybrid_sliding"})
_NEITHER = frozenset({"conv", "moe", "mlp"})
"""Entries of a configuration's `layer_types`: layers with keys and values, with a recurrent state, with nothing that
grows with the rows (the few columns of a convolution do not count)."""

_STATE_SIZES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("num_heads", "head_dim", "state_size"),
)
"""Fields whose product is the size of a recurrent state: gated delta rule, Nemotron-H, Bamba and its kin, Mamba-2."""

_CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_k")


@dataclass(slots=True, frozen=True)
class ModelShape:
    """Counts of parameters, and of the numbers that each token takes."""

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
    """Parameters of all linear layers within the layers, those that are loaded in 4 bits."""
    adapter_inputs: int
    """Inputs and outputs of all linear layers within the layers: parameters of an adapter of rank 1."""
    hidden: int
    saved_values: int
    """Activations of a token that all layers save for the backward pass: inputs and outputs of linear layers."""
    largest_saved: int
    """The same of the layer that saves most."""
    kv_values: int
    """Numbers of one token's keys and values in all layers, as the trainer's engines keep them."""
    state_bytes: int
    """Bytes of the states of one sequence in all recurrent layers; 0 for a model without any."""
    context: int | None
    """Most positions of prompt and completion together; None without a limit."""
    text: Any
    """Configuration of the text decoder."""


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


def has_tower(config: Any) -> bool:
    """Returns True for a model that has a text decoder beside other parts, such as a vision tower."""
    return config.get_text_config() is not config


def model_shape(name: str, config: Any) -> ModelShape:
    """Counts a model on the meta device. ValueError, with the reason, for one whose layers are not predicted."""
    if has_tower(config) and type(config) not in AutoModelForImageTextToText._model_mapping:
        raise ValueError(
            f"{name}: models of type {config.model_type!r} have a text decoder beside parts for other things than "
            "images; plan for a text model of the same sizes"
        )
    try:
        return _shape(name, config)
    except Exception as error:  # model files fail in many ways on configurations that they do not expect
        raise ValueError(
            f"{name}: models of type {config.model_type!r} have layers of a kind that is not predicted, or this "
            f"configuration does not make one ({type(error).__name__}: {_first_line(error)}); `groupgrad check` "
            "measures the memory of a small round"
        ) from error


def _shape(name: str, config: Any) -> ModelShape:
    kind: Any = AutoModelForImageTextToText if has_tower(config) else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    text, head = config.get_text_config(), model.get_output_embeddings()
    layers = _decoder_layers(model, text.num_hidden_layers)
    chosen = next((int(n) for field in _CHOSEN_EXPERTS if (n := getattr(text, field, None))), 1)
    saved = [_saved_values(layer, chosen) for layer in layers]
    if getattr(model, "_is_stateful", False) and not _state_bytes(text):
        raise ValueError(f"the size of the states of {type(model).__name__} is unknown")
    return ModelShape(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=len(layers),
        layer_parameters=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        head_parameters=head.weight.numel() if head is not None else 0,
        largest_parameter=max(p.numel() for p in model.parameters()),
        linear_parameters=sum(part.weight.numel() for part in _linear(layers)),
        adapter_inputs=sum(sum(part.weight.shape) for part in _linear(layers)),
        hidden=text.hidden_size,
        saved_values=sum(saved),
        largest_saved=max(saved),
        kv_values=cache_values(text, 1, latent=False),
        state_bytes=_state_bytes(text),
        context=max_context(model),
        text=text,
    )


def _decoder_layers(model: Any, count: int) -> torch.nn.ModuleList:
    """The `count` layers of the text decoder. ValueError if they do not lie in one list."""
    lists = (m for m in (model.get_decoder() or model).modules() if isinstance(m, torch.nn.ModuleList))
    found = next((found for found in lists if len(found) == count), None)
    if not found:
        raise ValueError(f"there is no list of {count} layers in {type(model).__name__}")
    return found


def _linear(part: torch.nn.Module) -> list[Any]:
    return [module for module in part.modules() if isinstance(module, (torch.nn.Linear, Conv1D))]


def _saved_values(layer: torch.nn.Module, chosen_experts: int) -> int:
    """Numbers of a token that a layer saves: inputs and outputs of its linear layers, of experts those of the chosen.

    An input that several of them share counts for each, which makes up for norms, rotary embeddings and products.
    """
    experts = [p.shape for name, p in layer.named_parameters() if ".experts." in name and p.dim() == 3]
    return sum(sum(part.weight.shape) for part in _linear(layer)) + chosen_experts * sum(sum(s[1:]) for s in experts)


def _layer_kinds(text: Any) -> list[str | None]:
    """The kind of each layer; None for all where the configuration has one kind. ValueError for an unknown one."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if unknown := sorted(set(kinds or ()) - _KEYS - _STATES - _NEITHER):
        raise ValueError(f"layers of the kind {unknown[0]!r}")
    return list(kinds) if kinds else [None] * text.num_hidden_layers


def _state_bytes(text: Any) -> int:
    """Bytes of a sequence's recurrent states, which are float32."""
    count = sum(kind is None or kind in _STATES for kind in _layer_kinds(text))
    for fields in _STATE_SIZES:
        if all(isinstance(getattr(text, field, None), int) for field in fields):
            return 4 * count * math.prod(getattr(text, field) for field in fields)
    return 0


def cache_values(text: Any, num_tokens: int, *, latent: bool, tensor_parallel_size: int = 1) -> int:
    """Numbers of the keys and values of so many tokens of a row. Layers with a window keep no more than that.

    The last `num_kv_shared_layers` read those of earlier layers. With `latent`, multi-head latent attention keeps one
    vector for all heads, as in vLLM, where transformers keeps whole keys and values.
    """
    layers, kinds, num_values = layer_configs(text), _layer_kinds(text), 0
    num_stored = len(layers) - (getattr(text, "num_kv_shared_layers", 0) or 0)
    for layer, kind in list(zip(layers, kinds))[:num_stored]:
        if kind is None or kind in _KEYS:
            window = int(getattr(layer, "sliding_window", None) or num_tokens) if kind == "sliding_attention" else None
            length = num_tokens if window is None else min(window, num_tokens)
            num_values += length * _values_per_token(layer, latent, tensor_parallel_size)
    return num_values


def _values_per_token(layer: Any, latent: bool, tensor_parallel_size: int) -> int:
    """Numbers of a token's keys and values in a layer, on one of the ranks that share it."""
    heads = int(getattr(layer, "num_attention_heads", 0) or 0)
    if not heads:
        return 0
    if rank := getattr(layer, "kv_lora_rank", None):
        rotated = int(getattr(layer, "qk_rope_head_dim", 0))
        return rank + rotated if latent else heads * (layer.qk_nope_head_dim + rotated + layer.v_head_dim)
    kv_heads = max(1, int(getattr(layer, "num_key_value_heads", None) or heads) // tensor_parallel_size)
    return 2 * kv_heads * int(getattr(layer, "head_dim", None) or layer.hidden_size // heads)


def _first_line(error: Exception) -> str:
    """The first line without its full stop; of a long one the sentences that are whole, or its beginning."""
    line = (str(error).splitlines() or [""])[0].rstrip(".")
    if len(line) <= 200:
        return line
    sentences = line[:200].rpartition(". ")[0]
    return sentences or f"{line[:200]} ..."
