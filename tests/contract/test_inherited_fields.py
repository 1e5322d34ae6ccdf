"""Effect of every field of `transformers.TrainingArguments` in this trainer, and the test that shows it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import inspect
import re
import sys
import types
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from simulated_trackio import Trackio
from transformers import training_args
from transformers.utils import logging as transformers_logging

from groupgrad import GRPOConfig
from groupgrad.errors import ConfigError

ROOT = Path(__file__).parents[2]
HERE = "tests/contract/test_inherited_fields.py"
RUNS = "tests/trainer/test_inherited.py"
OPTIONS = "tests/trainer/test_options.py"
HUB = "tests/contract/test_hub.py"


SHOWN: dict[str, dict[str, str]] = {
    # test: the fields whose effect it shows, by who reads them, a module of transformers or this package
    f"{RUNS}::test_when_it_logs_evaluates_and_saves": {
        "trainer": "output_dir save_total_limit eval_on_start",
        "trainer_callback": "save_strategy logging_strategy logging_first_step eval_strategy eval_delay",
        "training_args": "save_steps logging_steps eval_steps",
    },
    f"{RUNS}::test_number_of_steps": {
        "groupgrad": "per_device_train_batch_size gradient_accumulation_steps",
        "trainer": "num_train_epochs max_steps",
    },
    f"{OPTIONS}::test_it_changes_the_weights": {"trainer": "learning_rate"},
    f"{RUNS}::test_learning_rates": {
        "trainer": "lr_scheduler_type lr_scheduler_kwargs",
        "training_args": "warmup_steps",
    },
    f"{HERE}::test_optimizer_arguments": {
        "trainer": "optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon"
    },
    f"{HERE}::test_an_optimizer_of_chosen_modules": {"trainer_optimizer": "optim_target_modules"},
    f"{RUNS}::test_gradients_are_clipped": {"trainer": "max_grad_norm"},
    "tests/trainer/test_precision.py::test_the_engine_samples_in_the_type_that_training_computes_in": {
        "training_args": "bf16"
    },
    "tests/config/test_resolved.py::test_bf16_is_the_default_where_an_accelerator_has_it": {"training_args": "fp16"},
    f"{HERE}::test_reduced_precision_products": {"training_args": "tf32"},
    f"{RUNS}::test_activation_checkpointing": {
        "trainer": "activation_checkpointing activation_checkpointing_kwargs",
        "groupgrad": "gradient_checkpointing gradient_checkpointing_kwargs",
    },
    f"{RUNS}::test_the_compiler_gets_its_options": {
        "training_args": "torch_compile",
        "trainer": "torch_compile_backend torch_compile_mode",
    },
    f"{RUNS}::test_kernels_are_put_into_the_model": {"trainer": "use_liger_kernel liger_kernel_config"},
    f"{RUNS}::test_noise_on_embeddings": {"trainer": "neftune_noise_alpha"},
    f"{RUNS}::test_the_cache_of_the_device_is_emptied": {"trainer": "torch_empty_cache_steps"},
    f"{HERE}::test_logging_and_saving_processes": {
        "training_args": "log_on_each_node log_level_replica save_on_each_node"
    },
    f"{RUNS}::test_a_loss_that_is_not_a_number": {"trainer": "logging_nan_inf_filter"},
    f"{RUNS}::test_tokens_and_memory_are_measured_when_asked_for": {
        "trainer": "include_num_input_tokens_seen skip_memory_metrics"
    },
    f"{HERE}::test_log_levels": {"training_args": "log_level"},
    "tests/run_folder/test_progress.py::test_without_a_bar_there_is_one_plain_line_a_log": {
        "groupgrad": "disable_tqdm"
    },
    f"{HERE}::test_tracker_arguments": {
        "trainer": "report_to",
        "integrations.integration_utils": "run_name project trackio_space_id trackio_bucket_id trackio_static_space_id",
    },
    "tests/trainer/test_evaluation.py::test_metrics_are_exact_over_uneven_batches": {
        "groupgrad": "per_device_eval_batch_size"
    },
    f"{RUNS}::test_what_a_checkpoint_holds": {"trainer": "save_only_model"},
    f"{RUNS}::test_a_checkpoint_asked_for_by_a_signal": {"trainer": "enable_jit_checkpoint"},
    "tests/trainer/test_resume.py::test_the_best_model_is_loaded_at_the_end": {
        "trainer": "load_best_model_at_end metric_for_best_model greater_is_better"
    },
    f"{RUNS}::test_callbacks_and_data_of_a_resumed_run": {
        "trainer": "ignore_data_skip restore_callback_states_from_checkpoint"
    },
    "tests/cli/test_train.py::test_resuming_and_pushing": {"groupgrad": "resume_from_checkpoint"},
    f"{HUB}::test_pushes_while_training": {"trainer": "push_to_hub hub_token hub_always_push"},
    f"{HUB}::test_the_repository_is_created_as_asked": {"trainer": "hub_private_repo hub_model_id"},
    f"{HUB}::test_one_push_at_the_end": {"trainer": "hub_strategy"},
    f"{HERE}::test_the_branch_that_receives_a_push": {"trainer": "hub_revision"},
    f"{OPTIONS}::test_data_seed_orders_the_prompts_and_seed_samples": {"groupgrad": "seed data_seed"},
    f"{RUNS}::test_full_determinism": {"trainer": "full_determinism"},
    f"{HERE}::test_process_group_arguments": {"training_args": "use_cpu ddp_backend ddp_timeout"},
    f"{HERE}::test_accelerator_arguments": {"trainer": "accelerator_config"},
    f"{HERE}::test_data_loader_arguments": {
        "groupgrad": "dataloader_drop_last dataloader_num_workers dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context"
    },
    f"{OPTIONS}::test_remove_unused_columns_hides_what_no_signature_names": {"groupgrad": "remove_unused_columns"},
    "tests/trainer/test_processes_memory.py::test_ranks_join_as_they_are_told": {
        "groupgrad": "ddp_bucket_cap_mb ddp_broadcast_buffers"
    },
    "tests/trainer/test_zero.py::test_zero_is_data_parallelism": {"training_args": "deepspeed"},
    f"{RUNS}::test_overflow_is_looked_for": {"trainer": "debug"},
}

WITHOUT_EFFECT: dict[str, Any] = {  # set to these values, they warn
    "average_tokens_across_devices": False,
    "use_cache": True,
    "prediction_loss_only": True,
    "eval_do_concat_batches": False,
    "eval_use_gather_object": True,
    "eval_accumulation_steps": 2,
    "include_for_metrics": ["inputs"],
    "batch_eval_metrics": True,
    "dataloader_in_order": False,
    "label_names": ["labels"],
    "length_column_name": "size",
    "ddp_find_unused_parameters": False,
    "ddp_static_graph": True,
    "fsdp_config": {"min_num_params": 1},
}

REFUSED: dict[str, tuple[Any, str]] = {  # they cannot be set to these values, and what the error says
    "auto_find_batch_size": (True, "auto_find_batch_size=True.*Set it to False"),
    "label_smoothing_factor": (0.1, r"label_smoothing_factor=0\.1.*Set it to 0"),
    "bf16_full_eval": (True, "bf16_full_eval=True.*Set bf16_full_eval to False"),
    "fp16_full_eval": (True, "fp16_full_eval=True.*Set fp16_full_eval to False"),
    "parallelism_config": (ParallelismConfig(cp_size=2), "parallelism_config.*cp_size=2.*Set those sizes to 1"),
    "train_sampling_strategy": ("group_by_length", "train_sampling.*'group_by_length'.*shuffle_dataset=False"),
    "fsdp": ("full_shard", "fsdp shards weights over several processes, and there is one.*--num-processes 2"),
}

READ_NOWHERE = {  # neither here nor by what transformers does in a run
    "dataloader_pin_memory",  # batches are in pageable memory whatever its value; it is False on every CPU
    "local_rank",  # old launchers set it; which process this is comes from the environment
    *("do_train", "do_eval", "do_predict"),  # scripts read them to choose what to call
}


def make(**settings: Any) -> GRPOConfig:
    return GRPOConfig(**{"use_cpu": True, **settings})


def test_every_field_has_a_row():
    shown = [field for readers in SHOWN.values() for fields in readers.values() for field in fields.split()]
    rows = [*shown, *WITHOUT_EFFECT, *REFUSED, *READ_NOWHERE]
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(transformers.TrainingArguments))


def test_transformers_reads_what_it_is_said_to():
    for readers in SHOWN.values():
        for module, fields in readers.items():
            if module != "groupgrad":
                source = inspect.getsource(importlib.import_module(f"transformers.{module}"))
                assert [name for name in fields.split() if not re.search(rf"(args|self)\.{name}", source)] == []


def test_the_named_tests_are_there_and_about_their_fields():
    """The test's file, or a script that it runs, mentions the field."""
    for test, readers in SHOWN.items():
        path, function = test.split("::")
        text = (ROOT / path).read_text()
        assert f"def {function}(" in text
        if path == HERE:  # whose tables mention every field
            text = text[text.index("# --- proofs without a run") :]
        scripts = [other.read_text() for other in (ROOT / path).parent.glob("*.py") if other.name in text]
        for name in " ".join(readers.values()).split():
            assert any(name in source for source in [text, *scripts]), (test, name)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_without_effect_says_so(name):
    with pytest.warns(UserWarning, match=rf"no effect here.*\b{name}="):
        assert getattr(make(**{name: WITHOUT_EFFECT[name]}), name) == WITHOUT_EFFECT[name]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_names_itself(name):
    value, text = REFUSED[name]
    with pytest.raises(ConfigError, match=text):
        make(**{name: value})


def test_what_is_read_nowhere_is_not():
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert [name for name in READ_NOWHERE if f".{name}" in text] == [], path


# --- proofs without a run


def test_optimizer_arguments(make_trainer):
    settings = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "weight_decay": 0.1}
    optimizer = make_trainer({"optim": "adamw_torch", "learning_rate": 3e-3, **settings}).create_optimizer()
    assert type(optimizer) is torch.optim.AdamW
    decayed, others = optimizer.param_groups
    assert (decayed["lr"], decayed["betas"], decayed["eps"]) == (3e-3, (0.8, 0.95), 1e-5)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    optimizer = make_trainer({"optim": "sgd", "optim_args": "momentum=0.5"}).create_optimizer()
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_an_optimizer_of_chosen_modules(make_trainer, monkeypatch):
    class GaLore(torch.optim.AdamW):
        def __init__(self, params: Any, **kwargs: Any):
            super().__init__([{"params": group["params"], "projected": "rank" in group} for group in params])

    package: Any = types.ModuleType("galore_torch")
    package.GaLoreAdafactor = package.GaLoreAdamW = package.GaLoreAdamW8bit = GaLore
    monkeypatch.setitem(sys.modules, "galore_torch", package)
    monkeypatch.setattr("transformers.trainer_optimizer.is_galore_torch_available", lambda: True)
    trainer = make_trainer({"optim": "galore_adamw", "optim_target_modules": ["q_proj"]})
    groups = trainer.create_optimizer().param_groups
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    (chosen,) = [[names[id(p)] for p in group["params"]] for group in groups if group["projected"]]
    assert chosen == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]


def test_reduced_precision_products(monkeypatch):
    calls: list[bool] = []
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(training_args, "enable_tf32", calls.append)
    make(tf32=True)
    make(tf32=False)
    make()
    assert calls == [True, False]


def test_log_levels(make_trainer):
    before = transformers_logging.get_verbosity()
    try:
        make_trainer({"log_level": "error"})
        assert transformers_logging.get_verbosity() == transformers_logging.ERROR
    finally:
        transformers_logging.set_verbosity(before)


@pytest.mark.parametrize("each_node", [True, False])
def test_logging_and_saving_processes(each_node):
    """Checks the first process of the second node."""
    config = make(
        log_on_each_node=each_node, save_on_each_node=each_node, log_level="info", log_level_replica="critical"
    )
    config.distributed_state = types.SimpleNamespace(local_process_index=0, process_index=2)  # pyright: ignore
    assert config.should_save is config.should_log is each_node
    expected = transformers_logging.INFO if each_node else transformers_logging.CRITICAL
    assert config.get_process_log_level() == expected


def test_process_group_arguments(monkeypatch):
    joined: list[dict[str, Any]] = []
    original = training_args.PartialState

    def join(**kwargs: Any) -> Any:
        joined.append(kwargs)
        return original(cpu=True)

    monkeypatch.setattr(training_args, "PartialState", join)
    assert make(use_cpu=True, ddp_backend="gloo").device == torch.device("cpu")
    make(use_cpu=False, bf16=False, ddp_backend="gloo", ddp_timeout=60)
    assert joined[0] == {"cpu": True, "backend": "gloo"}
    assert joined[1] == {"backend": "gloo", "timeout": timedelta(seconds=60)}


def test_accelerator_arguments(make_trainer):
    accumulation = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    accelerator = make_trainer(accumulation).accelerator
    assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is True


def test_data_loader_arguments(make_trainer):
    settings = {
        "dataloader_num_workers": 1,
        "dataloader_prefetch_factor": 3,
        "dataloader_persistent_workers": True,
        "dataloader_multiprocessing_context": "fork",
    }
    trainer = make_trainer(settings)
    loader = trainer.get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)
    assert loader.multiprocessing_context.get_start_method() == "fork"
    keys = list(loader)
    assert keys == list(make_trainer().get_train_dataloader())
    assert len(keys) == 2
    three = trainer.train_dataset.select(range(3))
    assert len(make_trainer(train_dataset=three).get_train_dataloader()) == 2
    assert len(make_trainer({"dataloader_drop_last": True}, train_dataset=three).get_train_dataloader()) == 1


def test_the_branch_that_receives_a_push(make_trainer, monkeypatch):
    uploads: list[dict[str, Any]] = []
    trainer = make_trainer({"hub_revision": "drafts", "hub_model_id": "ada/tiny"})
    monkeypatch.setattr(trainer, "init_hf_repo", lambda *args, **kwargs: None)
    fake = types.SimpleNamespace(upload_folder=lambda **kwargs: uploads.append(kwargs))
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *args, **kwargs: fake)
    trainer.push_to_hub()
    assert [upload["revision"] for upload in uploads] == ["drafts"]


def test_tracker_arguments(make_trainer, monkeypatch):
    tracker = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.setattr("transformers.modelcard.AUTOGENERATED_TRAINER_COMMENT", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = make_trainer(
            {
                "report_to": "trackio",
                "run_name": "first",
                "project": "sums",
                "trackio_space_id": "me/space",
                "trackio_bucket_id": "me/bucket",
                "trackio_static_space_id": "me/still",
            }
        )
    trainer.train()
    arguments = {"project": "sums", "name": "first", "space_id": "me/space", "bucket_id": "me/bucket"}
    assert arguments.items() <= tracker.calls["init"].items()
    assert (tracker.calls["freeze"]["project"], tracker.calls["freeze"]["new_space_id"]) == ("sums", "me/still")
    assert any("train/reward" in values for values in tracker.logged)
    assert tracker.config["num_generations"] == 2
