"""Effect of every field of `transformers.TrainingArguments` in this trainer, and the test that shows it."""

from __future__ import annotations

import contextvars
import dataclasses
import importlib
import importlib.machinery
import inspect
import sys
import types
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from transformers import training_args
from transformers.utils import logging as transformers_logging

from groupgrad import GRPOConfig
from groupgrad.errors import ConfigError

ROOT = Path(__file__).parents[2]
HERE = "tests/contract/test_inherited_fields.py"
RUNS = "tests/trainer/test_inherited.py"
OPTIONS = "tests/trainer/test_options.py"
HUB = "tests/contract/test_hub.py"


@dataclass(slots=True, frozen=True)
class Trainer:
    """A module of transformers reads the field, and `test` shows that it works in this trainer."""

    module: str
    test: str


@dataclass(slots=True, frozen=True)
class Changes:
    """This trainer reads the field, and `test` (`path::name`) shows the effect."""

    test: str


@dataclass(slots=True, frozen=True)
class Warns:
    """The field has no effect; setting it to `value`, beside `others`, warns."""

    value: Any
    others: tuple[tuple[str, Any], ...] = ()


@dataclass(slots=True, frozen=True)
class Raises:
    """The field cannot be set to `value`."""

    value: Any


@dataclass(slots=True, frozen=True)
class Listed:
    """Neither this trainer nor transformers reads the field."""

    reason: str


OPTIMIZER = f"{HERE}::test_optimizer_arguments"
LENGTH = f"{RUNS}::test_number_of_steps"
RATES = f"{RUNS}::test_learning_rates"
LOGS = f"{RUNS}::test_when_it_logs"
SAVES = f"{RUNS}::test_when_it_saves"
EVALUATES = f"{RUNS}::test_when_it_evaluates"
BEST = "tests/trainer/test_resume.py::test_the_best_model_is_loaded_at_the_end"
TOKENS = f"{RUNS}::test_tokens_seen"
TRACKER = Trainer("integrations.integration_utils", f"{HERE}::test_tracker_arguments")
ACCELERATOR = Trainer("trainer", f"{HERE}::test_accelerator_arguments")
AVERAGES = Changes("tests/trainer/test_processes_memory.py::test_ranks_join_as_they_are_told")
PROCESSES = Trainer("training_args", f"{HERE}::test_process_group_arguments")
LOADER = Changes(f"{HERE}::test_data_loader_arguments")
RECOMPUTES = Trainer("trainer", f"{RUNS}::test_activation_checkpointing")
COMPILES = Trainer("trainer", f"{RUNS}::test_the_compiler_gets_its_options")
CHANGED_WEIGHTS = f"{OPTIONS}::test_it_changes_the_weights"
SCRIPTS = "scripts read it to choose what to call; the trainer does not"

FIELDS: dict[str, Trainer | Changes | Warns | Raises | Listed] = {
    # length of the run
    "output_dir": Trainer("trainer", SAVES),
    "per_device_train_batch_size": Changes(LENGTH),
    "gradient_accumulation_steps": Changes(LENGTH),
    "num_train_epochs": Trainer("trainer", LENGTH),
    "max_steps": Trainer("trainer", LENGTH),
    "auto_find_batch_size": Raises(True),
    # optimizer and schedule
    "learning_rate": Trainer("trainer", CHANGED_WEIGHTS),
    "lr_scheduler_type": Trainer("trainer", RATES),
    "lr_scheduler_kwargs": Trainer("trainer", RATES),
    "warmup_steps": Trainer("training_args", RATES),
    "optim": Trainer("trainer", OPTIMIZER),
    "optim_args": Trainer("trainer", OPTIMIZER),
    "weight_decay": Trainer("trainer", OPTIMIZER),
    "adam_beta1": Trainer("trainer", OPTIMIZER),
    "adam_beta2": Trainer("trainer", OPTIMIZER),
    "adam_epsilon": Trainer("trainer", OPTIMIZER),
    "optim_target_modules": Trainer("trainer_optimizer", f"{HERE}::test_an_optimizer_of_chosen_modules"),
    "max_grad_norm": Trainer("trainer", f"{RUNS}::test_gradients_are_clipped"),
    "average_tokens_across_devices": Warns(False),
    "label_smoothing_factor": Raises(0.1),
    # precision, memory and speed
    "bf16": Trainer("training_args", f"{RUNS}::test_mixed_precision"),
    "fp16": Trainer(
        "training_args", "tests/config/test_resolved.py::test_bf16_is_the_default_where_an_accelerator_has_it"
    ),
    "bf16_full_eval": Raises(True),
    "fp16_full_eval": Raises(True),
    "tf32": Trainer("training_args", f"{HERE}::test_reduced_precision_products"),
    "activation_checkpointing": RECOMPUTES,
    "activation_checkpointing_kwargs": RECOMPUTES,
    "gradient_checkpointing": Changes(RECOMPUTES.test),
    "gradient_checkpointing_kwargs": Changes(RECOMPUTES.test),
    "torch_compile": Trainer("training_args", COMPILES.test),
    "torch_compile_backend": COMPILES,
    "torch_compile_mode": COMPILES,
    "use_liger_kernel": Trainer("trainer", f"{RUNS}::test_kernels_are_put_into_the_model"),
    "liger_kernel_config": Trainer("trainer", f"{RUNS}::test_kernels_are_put_into_the_model"),
    "use_cache": Warns(True),
    "neftune_noise_alpha": Trainer("trainer", f"{RUNS}::test_noise_on_embeddings"),
    "torch_empty_cache_steps": Trainer("trainer", f"{RUNS}::test_the_cache_of_the_device_is_emptied"),
    # logs and trackers
    "logging_strategy": Trainer("trainer_callback", LOGS),
    "logging_steps": Trainer("training_args", LOGS),
    "logging_first_step": Trainer("trainer_callback", LOGS),
    "log_on_each_node": Trainer("training_args", f"{HERE}::test_logging_and_saving_processes"),
    "logging_nan_inf_filter": Trainer("trainer", f"{RUNS}::test_a_loss_that_is_not_a_number"),
    "include_num_input_tokens_seen": Trainer("trainer", TOKENS),
    "log_level": Trainer("training_args", f"{HERE}::test_log_levels"),
    "log_level_replica": Trainer("training_args", f"{HERE}::test_logging_and_saving_processes"),
    "disable_tqdm": Changes("tests/run_folder/test_progress.py::test_without_a_bar_there_is_one_plain_line_a_log"),
    "report_to": Trainer("trainer", TRACKER.test),
    "run_name": TRACKER,
    "project": TRACKER,
    "trackio_space_id": TRACKER,
    "trackio_bucket_id": TRACKER,
    "trackio_static_space_id": TRACKER,
    # evaluation
    "eval_strategy": Trainer("trainer_callback", EVALUATES),
    "eval_steps": Trainer("training_args", EVALUATES),
    "eval_delay": Trainer("trainer_callback", EVALUATES),
    "eval_on_start": Trainer("trainer", EVALUATES),
    "per_device_eval_batch_size": Changes(f"{RUNS}::test_evaluation_batches"),
    "prediction_loss_only": Warns(True),
    "eval_do_concat_batches": Warns(False),
    "eval_use_gather_object": Warns(True),
    "eval_accumulation_steps": Warns(2),
    "include_for_metrics": Warns(["inputs"]),
    "batch_eval_metrics": Warns(True),
    # checkpoints and the hub
    "save_strategy": Trainer("trainer_callback", SAVES),
    "save_steps": Trainer("training_args", SAVES),
    "save_total_limit": Trainer("trainer", SAVES),
    "save_only_model": Trainer("trainer", f"{RUNS}::test_what_a_checkpoint_holds"),
    "save_on_each_node": Trainer("training_args", f"{HERE}::test_logging_and_saving_processes"),
    "enable_jit_checkpoint": Trainer("trainer", f"{RUNS}::test_a_checkpoint_asked_for_by_a_signal"),
    "load_best_model_at_end": Trainer("trainer", BEST),
    "metric_for_best_model": Trainer("trainer", BEST),
    "greater_is_better": Trainer("trainer", BEST),
    "ignore_data_skip": Trainer("trainer", f"{RUNS}::test_data_of_a_resumed_run"),
    "restore_callback_states_from_checkpoint": Trainer("trainer", f"{RUNS}::test_callbacks_of_a_resumed_run"),
    "resume_from_checkpoint": Changes("tests/cli/test_train.py::test_resuming_and_pushing"),
    "push_to_hub": Trainer("trainer", f"{HUB}::test_pushes_while_training"),
    "hub_token": Trainer("trainer", f"{HUB}::test_pushes_while_training"),
    "hub_private_repo": Trainer("trainer", f"{HUB}::test_the_repository_is_created_as_asked"),
    "hub_model_id": Trainer("trainer", f"{HUB}::test_the_repository_is_created_as_asked"),
    "hub_strategy": Trainer("trainer", f"{HUB}::test_one_push_at_the_end"),
    "hub_always_push": Trainer("trainer", f"{HUB}::test_pushes_while_training"),
    "hub_revision": Trainer("trainer", f"{HERE}::test_the_branch_that_receives_a_push"),
    # randomness, devices, data
    "seed": Changes(CHANGED_WEIGHTS),
    "data_seed": Changes(f"{OPTIONS}::test_data_seed_orders_the_prompts_and_seed_samples"),
    "full_determinism": Trainer("trainer", f"{RUNS}::test_full_determinism"),
    "use_cpu": Trainer("training_args", f"{HERE}::test_process_group_arguments"),
    "accelerator_config": ACCELERATOR,
    "parallelism_config": Raises(ParallelismConfig(cp_size=2)),
    "dataloader_drop_last": LOADER,
    "dataloader_num_workers": LOADER,
    "dataloader_persistent_workers": LOADER,
    "dataloader_prefetch_factor": LOADER,
    "dataloader_multiprocessing_context": LOADER,
    "dataloader_in_order": Warns(False),
    "dataloader_pin_memory": Listed("batches are in pageable memory whatever its value; it is False on every CPU"),
    "remove_unused_columns": Changes(f"{OPTIONS}::test_remove_unused_columns_hides_what_no_signature_names"),
    "label_names": Warns(["labels"]),
    "train_sampling_strategy": Raises("group_by_length"),
    "length_column_name": Warns("size"),
    # several processes
    "ddp_find_unused_parameters": Warns(False),
    "ddp_bucket_cap_mb": AVERAGES,
    "ddp_broadcast_buffers": AVERAGES,
    "ddp_static_graph": Warns(True),
    "ddp_backend": PROCESSES,
    "ddp_timeout": PROCESSES,
    "fsdp": Raises("full_shard"),
    "fsdp_config": Warns({"min_num_params": 1}),
    "deepspeed": Trainer("training_args", "tests/trainer/test_zero.py::test_zero_is_data_parallelism"),
    "local_rank": Listed("old launchers set it; which process this is comes from the environment"),
    # debugging, scripts
    "debug": Trainer("trainer", f"{RUNS}::test_overflow_is_looked_for"),
    "skip_memory_metrics": Trainer("trainer", f"{RUNS}::test_memory_is_measured_when_asked_for"),
    "do_train": Listed(SCRIPTS),
    "do_eval": Listed(SCRIPTS),
    "do_predict": Listed(SCRIPTS),
}

# Combinations in which a field that otherwise takes effect has none.
UNUSED_BESIDE: dict[str, Warns] = {
    "optim_args": Warns("momentum=0.9", (("optim", "adamw_torch"),)),
    "optim_target_modules": Warns("all-linear"),
    "liger_kernel_config": Warns({"rope": True}),
    "dataloader_persistent_workers": Warns(True),
    "dataloader_multiprocessing_context": Warns("fork"),
    "run_name": Warns("one"),
    "project": Warns("mine", (("report_to", "wandb"),)),
    "trackio_space_id": Warns("me/space"),
    "trackio_bucket_id": Warns("me/bucket"),
    "trackio_static_space_id": Warns(False),
}


def rows(effect: type) -> list[Any]:
    return [(name, row) for name, row in FIELDS.items() if isinstance(row, effect)]


def label(value: Any) -> str:
    return value if isinstance(value, str) else ""


def make(**settings: Any) -> GRPOConfig:
    return GRPOConfig(**{"use_cpu": True, **settings})


def test_every_field_has_a_row():
    assert set(FIELDS) == {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert len(rows(Listed)) <= 5


@pytest.mark.parametrize(("name", "row"), rows(Trainer), ids=label)
def test_the_base_class_reads_it(name, row):
    source = inspect.getsource(importlib.import_module(f"transformers.{row.module}"))
    assert f"args.{name}" in source or f"self.{name}" in source


@pytest.mark.parametrize(("name", "row"), [*rows(Trainer), *rows(Changes)], ids=label)
def test_the_named_test_is_there_and_about_it(name, row):
    """The test's file, or a script that it runs, mentions the field."""
    path, function = row.test.split("::")
    text = (ROOT / path).read_text()
    assert f"def {function}(" in text
    if path == HERE:  # whose tables mention every field
        text = text[text.index("# --- proofs without a run") :]
    scripts = [other.read_text() for other in (ROOT / path).parent.glob("*.py") if other.name in text]
    assert any(name in source for source in [text, *scripts])


@pytest.mark.parametrize(("name", "row"), [*rows(Warns), *UNUSED_BESIDE.items()], ids=label)
def test_a_field_without_effect_says_so(name, row):
    with pytest.warns(UserWarning, match=rf"no effect here.*\b{name}="):
        assert getattr(make(**{name: row.value}, **dict(row.others)), name) == row.value


@pytest.mark.parametrize(("name", "row"), rows(Raises), ids=label)
def test_a_refused_field_names_itself(name, row):
    with pytest.raises(ConfigError, match=rf"{name}.*([Ss]et|[Ll]eave|use) "):
        make(**{name: row.value})


@pytest.mark.parametrize("name", [name for name, _ in rows(Listed)])
def test_a_listed_field_is_read_nowhere(name):
    for path in (ROOT / "src").rglob("*.py"):
        assert f".{name}" not in path.read_text(), path


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


class Tracker(types.ModuleType):
    """A stand-in for trackio that records its calls."""

    __version__ = "1.0.0"

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
        self.calls: dict[str, dict[str, Any]] = {}
        self.logged: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.context_vars = types.SimpleNamespace(
            current_space_id=contextvars.ContextVar("space", default="me/space"),
            current_project=contextvars.ContextVar("project", default=None),
        )

    def init(self, **kwargs: Any) -> None:
        self.calls["init"] = kwargs

    def log(self, values: dict[str, Any], **kwargs: Any) -> None:
        self.logged.append(values)

    def freeze(self, **kwargs: Any) -> str:
        self.calls["freeze"] = kwargs
        return str(kwargs["new_space_id"])

    def finish(self) -> None:
        self.calls["finish"] = {}


def test_tracker_arguments(make_trainer, monkeypatch):
    tracker = Tracker()
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
