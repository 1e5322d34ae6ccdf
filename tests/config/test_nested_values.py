"""Values inside dicts, and names of enumerations, that cannot work are refused with the value seen."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad import GRPOConfig
from groupgrad.errors import ConfigError

# (setting, its value, texts in the message: the value seen, and what to set)
BAD: list[tuple[str, Any, list[str]]] = [
    ("generation_kwargs", {"max_new_tokens": "5"}, ["max_new_tokens='5'", "whole number of at least 1"]),
    ("generation_kwargs", {"do_sample": "yes"}, ["do_sample='yes'", "True or False"]),
    ("model_init_kwargs", {"trust_remote_code": "no"}, ["trust_remote_code='no'", "True or False"]),
    ("chat_template_kwargs", {"enable_thinking": "False"}, ["enable_thinking='False'", "True or False"]),
    ("gradient_checkpointing_kwargs", {"use_reentrant": "no"}, ["use_reentrant='no'", "True or False"]),
    ("lr_scheduler_type", "greedy", ["lr_scheduler_type greedy requires an eval strategy"]),
    ("lr_scheduler_type", "cosin", ["cosin is not a valid SchedulerType", "'cosine'"]),
    ("optim", "adamw", ["adamw is not a valid OptimizerNames", "adamw_torch"]),
    ("save_strategy", "step", ["step is not a valid SaveStrategy", "'steps'"]),
    ("hub_strategy", "always", ["always is not a valid HubStrategy", "every_save"]),
    ("warmup_ratio", 1.5, ["warmup_ratio=1.5", "from 0 to 1"]),
    ("beta", None, ["beta=None cannot work: it is no finite number", "0 or more"]),
]


@pytest.mark.parametrize(("name", "value", "texts"), BAD, ids=[f"{name}={value}"[:60] for name, value, _ in BAD])
def test_a_bad_value_is_named_with_what_to_set(name: str, value: Any, texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig("out", use_cpu=True, bf16=False, **{name: value})
    for text in texts:
        assert text in str(caught.value)
    assert len(caught.value.problems) == 1


def test_half_precision_that_changes_nothing_on_a_cpu_is_named() -> None:
    with pytest.warns(UserWarning, match=r"fp16=True .a CPU computes in float32"):
        GRPOConfig("out", use_cpu=True, fp16=True, bf16=False)


def test_ordinary_values_pass() -> None:
    config = GRPOConfig(
        "out",
        use_cpu=True,
        generation_kwargs={
            "eos_token_id": [1, 2],
            "stop_strings": "a",
            "suppress_tokens": [3],
            "min_new_tokens": 1,
            "use_cache": True,
        },
        model_init_kwargs={"attn_implementation": "paged|sdpa", "device_map": {"": "cpu"}, "use_safetensors": None},
        chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "low"},
        gradient_checkpointing_kwargs={"use_reentrant": False},
        optim_args="a=1, b=2",
        report_to=["none"],
    )
    assert config.generation_kwargs["eos_token_id"] == [1, 2]
