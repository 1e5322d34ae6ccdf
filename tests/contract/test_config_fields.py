"""Documented fields of GRPOConfig, their defaults, and the test that shows the effect of each."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from groupgrad import GRPOConfig
from groupgrad.config import legacy

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("GROUPGRAD_SHARED", ROOT.parent / "shared"))


def read_fields() -> list[dict[str, Any]]:
    """Names and defaults of `documented_fields.txt`: those of the documented signature, then those added later."""
    parts = Path(__file__).with_name("documented_fields.txt").read_text(encoding="utf-8").split("\n\n")
    calls = [ast.parse(f"GRPOConfig(\n{part}\n)", mode="eval").body for part in parts]
    return [{word.arg: ast.literal_eval(word.value) for word in call.keywords} for call in calls]  # pyright: ignore


DOCUMENTED, LATER = read_fields()

# Defaults that differ from the documented signature, and why.
DIFFERENT: dict[str, tuple[Any, str]] = {
    "vllm_mode": ("colocate", "the later main page says so, and it has precedence"),
    "gradient_checkpointing": (None, "on wherever it was, but on a CPU only where memory needs it"),
    "report_to": ("none", "default of the TrainingArguments that the main page refers to"),
    "trackio_space_id": (None, "default of the installed TrainingArguments"),
    "include_num_input_tokens_seen": ("no", "another spelling of False in the installed TrainingArguments"),
}


def default_of(field: dataclasses.Field) -> Any:
    """Returns the default of a dataclass field, from its factory if it has one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


DEFAULTS = {field.name: default_of(field) for field in dataclasses.fields(GRPOConfig)}
BASE = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
CHANGED = {"learning_rate", "logging_steps", "gradient_checkpointing", "bf16", "remove_unused_columns", "hub_token"}
"""Fields of TrainingArguments whose defaults GRPOConfig changes."""
OWN = (set(DEFAULTS) - BASE - set(legacy.LEGACY)) | CHANGED


def test_documented_fields_exist_with_their_defaults():
    for name, value in DOCUMENTED.items():
        expected = DIFFERENT.get(name, (value,))[0]
        assert (type(DEFAULTS[name]), DEFAULTS[name]) == (type(expected), expected), name
    assert all(DOCUMENTED[name] != value for name, (value, _) in DIFFERENT.items()), "nothing else is excused"


def test_later_fields_exist_with_their_defaults_and_no_others():
    assert {name: DEFAULTS[name] for name in LATER} == LATER
    assert set(DEFAULTS) - set(DOCUMENTED) - BASE == set(LATER) - BASE


def test_the_documented_signature_is_the_one_pinned_here():
    pages = sorted((SHARED / "reference" / "seeds").glob("001_*.txt"))
    if not pages:
        pytest.skip(f"the documented signature is not in {SHARED}; set GROUPGRAD_SHARED to the folder that has it")
    line = next(line for line in pages[0].read_text().splitlines() if line.startswith("( output_dir"))
    entry = re.compile(r"\s*(\w+?): (.+?) = (None|True|False|'[^']*'|<factory>|-?\d+(?:\.\d+)?(?:e-?\d+)?)")
    documented, position = {}, 1
    while match := entry.match(line, position):
        name, _, text = match.groups()
        documented[name], position = [] if text == "<factory>" else ast.literal_eval(text), match.end()
    assert line[position:].strip() == ")"
    assert list(documented.items()) == list(DOCUMENTED.items())


def test_every_field_explains_itself():
    for field in dataclasses.fields(GRPOConfig):
        if field.name in OWN or field.name in legacy.LEGACY:
            text = field.metadata.get("help", "")
            assert len(text) > 15 and text.endswith("."), field.name
            assert set(field.metadata) == {"help"}, field.name


# --- The effect of each field of GRPOConfig ---

SUPERVISED = "tests/trainer/test_reward_supervision.py::test_options_reach_the_calls"
REWARD_MODELS = "tests/trainer/test_reward_models.py::test_options_reach_the_reward_models"

SHOWN = {  # fields that no row of tests/mutations.yaml disconnects, and the test that shows their effect
    "learning_rate": "tests/trainer/test_options.py::test_it_changes_the_weights",
    "logging_steps": "tests/trainer/test_inherited.py::test_when_it_logs_evaluates_and_saves",
    "hub_token": "tests/contract/test_hub.py::test_pushes_while_training",
    "trust_remote_code": "tests/trainer/test_models.py::test_trust_remote_code",
    "allow_partial_resume": "tests/faults/test_resuming.py::test_allow_partial_resume_goes_on_and_says_what_is_new",
    "resume_learning_rate": "tests/faults/test_resuming.py::test_changed_options_are_listed",
    "dynamic_sampling_rounds": "tests/trainer/test_dynamic_sampling.py::test_the_groups_that_train_have_a_signal",
    "stop_without_signal": ("tests/trainer/test_step_log.py::test_a_run_whose_first_rewards_are_equal_ends_by_option"),
    "balance_ranks": "tests/trainer/test_processes.py::test_ranks_share_the_work_of_long_rows",
    "special_tokens_in_prompts": "tests/trainer/test_options.py::test_special_tokens_in_prompts",
    "hang_timeout_s": "tests/trainer/test_hangs.py::test_what_hangs_ends_the_run_with_its_name",
    "image_root": "tests/trainer/test_vision.py::test_paths_stay_below_image_root",
    "use_transformers_continuous_batching": "tests/trainer/test_engines.py::test_paged_generation_samples_a_run",
    "reuse_environments": "tests/contract/test_environment_reuse.py::test_how_often_an_environment_serves",
    "tool_threads": "tests/contract/test_agents.py::test_options_of_tools_reach_them",
    "use_vllm": "tests/trainer/test_vllm_policy.py::test_each_generation_batch_is_sampled_from_the_weights_of_its_step",
    "reward_timeout_s": "tests/trainer/test_reward_supervision.py::test_a_late_reward_ends_the_run_before_the_watchdog",
    "reward_workers": "tests/trainer/test_reward_supervision.py::test_a_worker_trains_as_the_process_itself",
    "reward_worker_memory_gb": SUPERVISED,
    "reward_retries": SUPERVISED,
    "reward_transient_errors": SUPERVISED,
    "on_reward_failure": SUPERVISED,
    "reward_model_device": REWARD_MODELS,
    "reward_model_offload": REWARD_MODELS,
    "log_completions_hub_repo": "tests/contract/test_hub.py::test_completions_are_uploaded",
    "rollouts_keep": "tests/trainer/test_run_folder.py::test_rollouts_keep_bounds_the_folder_and_is_said_once",
    "record_spans": "tests/trainer/test_run_traces.py::test_steps_rollouts_and_events_are_spans",
}

UNUSED = {  # fields that have no effect beside the defaults of the others; setting them to these values warns
    "pad_to_multiple_of": 8,
    "engine_pack_weights": True,
    "save_in_background": True,
    "ds3_gather_for_generation": False,
    "transformers_continuous_batching_config": {"a": 1},
    "vllm_mode": "server",
    "vllm_model_impl": "transformers",
    "vllm_enable_sleep_mode": True,
    "vllm_sleep_level": 1,
    "vllm_structured_outputs_regex": "a+",
    "vllm_server_base_url": "http://x",
    "vllm_server_host": "127.0.0.1",
    "vllm_server_port": 8001,
    "vllm_server_timeout": 10.0,
    "vllm_group_port": 51217,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 512,
    "vllm_tensor_parallel_size": 2,
    "vllm_lora_updates": "merge",
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.1,
    "log_multimodal": False,
}


def test_every_field_has_a_test_of_its_effect():
    """Rows of tests/mutations.yaml begin with the option that they disconnect; tests/mutate.py proves them."""
    rows = yaml.safe_load((ROOT / "tests" / "mutations.yaml").read_text(encoding="utf-8")).values()
    disconnected = {re.split(r"[ ,:=]", row["name"])[0] for part in rows for row in part}
    assert OWN - disconnected - set(UNUSED) == set(SHOWN)
    for test in SHOWN.values():
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("name", UNUSED)
def test_a_field_without_effect_says_so(name):
    assert UNUSED[name] != DEFAULTS[name]
    with pytest.warns(Warning, match=rf"no effect.*{name}="):
        GRPOConfig(use_cpu=True, **{name: UNUSED[name]})
