"""Configurations whose layers differ in sizes, as transformers describes them by `per_layer_config` (Gemma 4)."""

from __future__ import annotations

from typing import Any


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer of a text model; the model's own where all layers have the same sizes."""
    count = int(getattr(config, "num_hidden_layers", 0) or 0)
    return list(config.per_layer_config) if _is_mixed(config) else [config] * count


def layer_overrides(config: Any) -> dict[int, dict[str, Any]]:
    """The fields in which layers differ, with their values in each layer; empty where all layers are alike."""
    if not _is_mixed(config):
        return {}
    fields = config.per_layer_attributes
    return {i: {field: getattr(layer, field) for field in fields} for i, layer in enumerate(config.per_layer_config)}


def common_field(config: Any, name: str) -> Any:
    """The value of a field that is the same in all layers; None if it is missing, or differs between layers."""
    if _is_mixed(config) and name in config.per_layer_attributes:
        return None
    return getattr(config, name, None)


def _is_mixed(config: Any) -> bool:
    return getattr(config, "is_heterogeneous", False) is True
