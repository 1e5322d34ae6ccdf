"""Every option of transformers' `generate` reaches an engine that has it, or is refused or named before a run."""

from __future__ import annotations

from itertools import combinations

import pytest
from transformers import GenerationConfig

from groupgrad import GRPOConfig
from groupgrad.config.rules import OWNED_KEYS
from groupgrad.engines.generation_options import COST_ONLY, INTERNAL, MOVED, NATIVE
from groupgrad.engines.native.sampling_params import _NEUTRAL
from groupgrad.errors import ConfigError

GENERATE = frozenset(
    {
        *("num_beams", "early_stopping", "length_penalty", "max_time"),
        *("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
        *("bad_words_ids", "sequence_bias", "forced_eos_token_id", "remove_invalid_values", "watermarking_config"),
        *("cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config"),
    }
)
"""Options of `generate` that the native engine lacks."""


def make(**settings) -> GRPOConfig:
    return GRPOConfig("out", use_cpu=True, bf16=False, **settings)


def test_every_option_of_generate_has_one_place():
    tables = [NATIVE, GENERATE, COST_ONLY, MOVED, INTERNAL, OWNED_KEYS.keys() - {"do_sample"}]
    assert not any(one & other for one, other in combinations(tables, 2))
    fields = set(vars(GenerationConfig())) | {"stop_strings"}
    assert fields <= set().union(*tables)
    assert set(_NEUTRAL) <= GENERATE


@pytest.mark.parametrize("name", sorted(MOVED))
def test_an_option_that_generate_lost_is_refused(name):
    with pytest.raises(ConfigError, match=f"generation_kwargs has '{name}'.* which neither"):
        make(generation_kwargs={name: 3})


@pytest.mark.parametrize("name", sorted(OWNED_KEYS))
def test_an_option_that_the_run_sets_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0 .*Take it out"):
        make(generation_kwargs={name: 0})
