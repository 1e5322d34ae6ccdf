"""The facts about model families that this package relies on: one table row per family of transformers models.

The self-check compares every model with its own dense forward pass before training, so a family that is missing here
still trains; it only runs on a slower path. The facts are read from `modeling_*.py` of transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LogitEffect = Literal["multiply", "divide", "cap"]


@dataclass(slots=True, frozen=True)
class Family:
    """One model family. Class names are those in `transformers.models`; empty where a fact does not hold."""

    model_type: str
    """Prefix of `config.model_type`."""
    causal_lm: str = ""
    """Pre-norm decoder of RMS norms, rotary embeddings on whole heads and gated MLPs, with nothing else in between."""
    decoder: str = ""
    """The same decoder inside a VLM. Where its positions have several axes, those of text tokens are equal."""
    norm: str = ""
    """Computes weight * (x / sqrt(mean(x^2) + epsilon)) in this order of operations."""
    mlp: str = ""
    """Computes down(activation(gate(x)) * up(x))."""
    centred_norm: str = ""
    """Computes (1 + weight) * (x / sqrt(mean(x^2) + eps))."""
    gated_norm: str = ""
    """Computes weight * (x / sqrt(mean(x^2) + variance_epsilon)) * silu(gate) of x and a gate."""
    grouped_norm: str = ""
    """Computes weight * (x / sqrt(mean(x^2) + variance_epsilon)) in groups of `group_size` of x * silu(gate), of x and
    a gate."""
    hybrid_lm: str = ""
    """Pre-norm decoder of RMS norms whose layers have a mixer, an MLP, or one after the other. A mixer is the gated
    delta rule, Mamba-2, a short convolution, or attention, whose gates may lie beside the queries and whose rotary
    embeddings may turn a part of a head; an MLP is gated or a squared ReLU."""
    hybrid_decoder: str = ""
    """The same decoder inside a VLM, as above."""
    logit_effects: dict[str, LogitEffect] = field(default_factory=dict)
    """Config field -> operation that the model applies to the output head's logits with the field's value."""
    bidirectional_images: bool = False
    """Tokens of one image attend to each other in both directions."""


FAMILIES = (
    Family("llama", "LlamaForCausalLM", "LlamaModel", "LlamaRMSNorm", "LlamaMLP"),
    Family("mistral", "MistralForCausalLM", "MistralModel", "MistralRMSNorm", "MistralMLP"),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2Model", "Qwen2RMSNorm", "Qwen2MLP"),
    Family("qwen2_vl", decoder="Qwen2VLTextModel"),
    Family("qwen2_5_vl", decoder="Qwen2_5_VLTextModel"),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3Model", "Qwen3RMSNorm", "Qwen3MLP"),
    Family("qwen3_vl", decoder="Qwen3VLTextModel"),
    Family(
        "qwen3_5",
        hybrid_lm="Qwen3_5ForCausalLM",
        hybrid_decoder="Qwen3_5TextModel",
        mlp="Qwen3_5MLP",
        centred_norm="Qwen3_5RMSNorm",
        gated_norm="Qwen3_5RMSNormGated",
    ),
    Family("qwen3_5_moe", mlp="Qwen3_5MoeMLP", centred_norm="Qwen3_5MoeRMSNorm", gated_norm="Qwen3_5MoeRMSNormGated"),
    Family("olmo_hybrid", norm="OlmoHybridRMSNorm", mlp="OlmoHybridMLP", gated_norm="OlmoHybridRMSNormGated"),
    Family(
        "nemotron_h",
        hybrid_lm="NemotronHForCausalLM",
        norm="NemotronHRMSNorm",
        grouped_norm="NemotronHRMSNormGated",
    ),
    Family(
        "bamba", hybrid_lm="BambaForCausalLM", norm="BambaRMSNorm", mlp="BambaMLP", grouped_norm="BambaRMSNormGated"
    ),
    Family("granitemoehybrid", norm="GraniteMoeHybridRMSNorm", grouped_norm="GraniteMoeHybridRMSNormGated"),
    Family("mamba2", norm="Mamba2RMSNorm", grouped_norm="MambaRMSNormGated"),
    Family("lfm2", hybrid_lm="Lfm2ForCausalLM", norm="Lfm2RMSNorm", mlp="Lfm2MLP"),
    Family("lfm2_moe", norm="Lfm2MoeRMSNorm", mlp="Lfm2MoeMLP"),
    Family("gemma", mlp="GemmaMLP", centred_norm="GemmaRMSNorm"),
    Family(
        "gemma2",
        mlp="Gemma2MLP",
        centred_norm="Gemma2RMSNorm",
        logit_effects={"final_logit_softcapping": "cap"},
    ),
    Family(
        "gemma3",
        mlp="Gemma3MLP",
        centred_norm="Gemma3RMSNorm",
        logit_effects={"final_logit_softcapping": "cap"},
        bidirectional_images=True,
    ),
    Family("gemma4", logit_effects={"final_logit_softcapping": "cap"}),
    Family("recurrent_gemma", logit_effects={"logits_soft_cap": "cap"}),
    Family("cohere", logit_effects={"logit_scale": "multiply"}),
    Family("granite", logit_effects={"logits_scaling": "divide"}),
    Family("falcon_h1", norm="FalconH1RMSNorm", logit_effects={"lm_head_multiplier": "multiply"}),
)

CAUSAL_LMS = frozenset(family.causal_lm for family in FAMILIES if family.causal_lm)
DECODERS = frozenset(family.decoder for family in FAMILIES if family.decoder)
HYBRID_LMS = frozenset(family.hybrid_lm for family in FAMILIES if family.hybrid_lm)
HYBRID_DECODERS = frozenset(family.hybrid_decoder for family in FAMILIES if family.hybrid_decoder)
NORMS = frozenset(family.norm for family in FAMILIES if family.norm)
MLPS = frozenset(family.mlp for family in FAMILIES if family.mlp)
CENTRED_NORMS = frozenset(family.centred_norm for family in FAMILIES if family.centred_norm)
GATED_NORMS = frozenset(family.gated_norm for family in FAMILIES if family.gated_norm)
GROUPED_NORMS = frozenset(family.grouped_norm for family in FAMILIES if family.grouped_norm)

POSITION_ONLY_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles depend on the position alone, not on the sequence length."""

IMAGE_TOKEN_FIELDS = ("image_token_id", "image_token_index")
"""Config fields that hold the id of an image's placeholder token, by precedence."""

VIDEO_TOKEN_FIELDS = ("video_token_id", "video_token_index")

IMAGE_TILE_TOKENS = ("<fake_token_around_image>", "<global-img>")
"""Idefics 3 and SmolVLM split an image into tiles: the token before and after each, and the whole image's own."""


def is_transformers_class(cls: type) -> bool:
    """True if transformers defines the class, so that its name identifies its computation."""
    return cls.__module__.startswith("transformers.models.")


def is_rms_norm(module: Any) -> bool:
    """True for an RMSNorm whose only parameter is `weight`; its epsilon is `variance_epsilon`."""
    return type(module).__name__.endswith("RMSNorm") and set(module._parameters) == {"weight"}


def logit_effect(model_type: str, config_field: str) -> LogitEffect | None:
    """The operation on the logits that a config field stands for; None if it is unknown."""
    return next((f.logit_effects[config_field] for f in _of_type(model_type) if config_field in f.logit_effects), None)


def has_bidirectional_images(model_type: str) -> bool:
    """True if tokens of one image attend to each other in both directions."""
    return any(family.bidirectional_images for family in _of_type(model_type))


def _of_type(model_type: str) -> list[Family]:
    return [family for family in FAMILIES if model_type.startswith(family.model_type)]


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer of a text model; the model's own where all layers have the same sizes."""
    count = int(getattr(config, "num_hidden_layers", 0) or 0)
    is_mixed = getattr(config, "is_heterogeneous", False) is True
    return list(config.per_layer_config) if is_mixed else [config] * count
