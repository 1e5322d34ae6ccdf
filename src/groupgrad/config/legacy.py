"""Fields that scripts written for earlier releases still set: what becomes of each.

transformers 5 dropped many `TrainingArguments` fields, and some GRPO fields were renamed. `LEGACY` lists them all, and
`LegacyArguments` makes them fields again. `take_over` moves each value to where it lives now and puts the old field
back to its default, so that a copy of a config says everything once.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from groupgrad.errors import ConfigError


@dataclass(slots=True, frozen=True)
class Legacy:
    """One field of the past."""

    type: Any
    default: Any
    why: str
    """Without `into` or `act`: why it has no effect. With one of them: what it became."""
    into: str | None = None
    """The field that takes the value."""
    act: Callable[[Any, Any], None] | None = None
    """Called with the config and the value, for what a plain renaming cannot do."""
    renamed: bool = False
    """True for a GRPO field that has a new name: using the old one is worth a warning."""


def _warmup_ratio(config: Any, ratio: float) -> None:
    # A count of steps always had precedence over the ratio; a fraction is the same quantity, and the newer wish.
    if config.warmup_steps >= 1:
        _say(f"warmup_ratio={ratio} is not used, because warmup_steps={config.warmup_steps} is set too")
    else:
        config.warmup_steps = ratio


def _logging_dir(config: Any, path: str) -> None:
    os.environ["TENSORBOARD_LOGGING_DIR"] = os.path.expanduser(path)


def _adafactor(config: Any, value: bool) -> None:
    config.optim = "adafactor"


def _hub_model_id(config: Any, name: str) -> None:
    organization = config.push_to_hub_organization
    config.hub_model_id = f"{organization}/{name}" if organization and "/" not in name else name


def _hub_organization(config: Any, organization: str) -> None:
    # Without a model name the repository is called after the output folder, as it always was.
    if config.hub_model_id is None:
        name = os.path.basename(os.path.normpath(config.output_dir or "trainer_output"))
        config.hub_model_id = f"{organization}/{name}"


def _torchdynamo(config: Any, engine: str) -> None:
    config.torch_compile = True
    config.torch_compile_backend = config.torch_compile_backend or engine


_str, _int, _bool = str | None, int | None, bool | None

LEGACY: dict[str, Legacy] = {
    # --- dropped by transformers 5, still meaningful ---
    "per_gpu_train_batch_size": Legacy(_int, None, "per_device_train_batch_size", into="per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Legacy(_int, None, "per_device_eval_batch_size", into="per_device_eval_batch_size"),
    "warmup_ratio": Legacy(float, 0.0, "a fraction given as warmup_steps", act=_warmup_ratio),
    "logging_dir": Legacy(_str, None, "the TENSORBOARD_LOGGING_DIR environment variable", act=_logging_dir),
    "no_cuda": Legacy(bool, False, "use_cpu", into="use_cpu"),
    "adafactor": Legacy(bool, False, "optim='adafactor'", act=_adafactor),
    "push_to_hub_model_id": Legacy(_str, None, "hub_model_id", act=_hub_model_id),
    "push_to_hub_organization": Legacy(_str, None, "the owner in hub_model_id", act=_hub_organization),
    "push_to_hub_token": Legacy(_str, None, "hub_token", into="hub_token"),
    "torchdynamo": Legacy(_str, None, "torch_compile_backend", act=_torchdynamo),
    # --- dropped by transformers 5, without meaning today ---
    "overwrite_output_dir": Legacy(bool, False, "training never empties the output folder"),
    "save_safetensors": Legacy(bool, True, "weights are always saved as safetensors"),
    "use_mps_device": Legacy(bool, False, "an Apple GPU is used whenever there is one; set use_cpu=True to avoid it"),
    "jit_mode_eval": Legacy(bool, False, "evaluation samples completions, which cannot be traced"),
    "fp16_opt_level": Legacy(str, "O1", "it belonged to NVIDIA Apex; fp16=True uses PyTorch's own mixed precision"),
    "half_precision_backend": Legacy(str, "auto", "PyTorch's own mixed precision is the only one left"),
    "fp16_backend": Legacy(str, "auto", "PyTorch's own mixed precision is the only one left"),
    "tpu_num_cores": Legacy(_int, None, "the launcher sets the number of TPU processes"),
    "tpu_metrics_debug": Legacy(bool, False, "set debug='tpu_metrics_debug' instead"),
    "include_inputs_for_metrics": Legacy(bool, False, "reward functions see the prompts and all columns anyway"),
    "past_index": Legacy(int, -1, "GRPO scores whole sequences and carries no past from batch to batch"),
    "fsdp_min_num_params": Legacy(int, 0, "it is a key of fsdp_config, 'min_num_params'"),
    "fsdp_transformer_layer_cls_to_wrap": Legacy(
        _str, None, "it is a key of fsdp_config, 'transformer_layer_cls_to_wrap'"
    ),
    "group_by_length": Legacy(bool, False, "prompts come in groups, and nothing is padded that grouping could save"),
    "use_legacy_prediction_loop": Legacy(bool, False, "there is only one evaluation loop"),
    "mp_parameters": Legacy(str, "", "SageMaker's model parallelism is not supported"),
    "ray_scope": Legacy(_str, "last", "give the scope to hyperparameter_search instead"),
    "include_tokens_per_second": Legacy(bool, False, "tokens are always counted; see num_tokens in the log"),
    # --- GRPO fields with a new name ---
    "use_liger_loss": Legacy(_bool, None, "use_liger_kernel", into="use_liger_kernel", renamed=True),
    "wandb_log_unique_prompts": Legacy(_bool, None, "log_unique_prompts", into="log_unique_prompts", renamed=True),
    "vllm_guided_decoding_regex": Legacy(
        _str, None, "vllm_structured_outputs_regex", into="vllm_structured_outputs_regex", renamed=True
    ),
    "vllm_importance_sampling_cap": Legacy(
        float | None,
        3.0,
        "vllm_importance_sampling_clip_max",
        into="vllm_importance_sampling_clip_max",
        renamed=True,
    ),
    "use_transformers_paged": Legacy(
        bool,
        False,
        "use_transformers_continuous_batching",
        into="use_transformers_continuous_batching",
        renamed=True,
    ),
    "max_prompt_length": Legacy(
        _int, None, "prompts are never cut; filter the data set before training, by the length you want"
    ),
}


def _fields() -> list[tuple[str, Any, Any]]:
    # A transformers release that still has one of these fields knows best what to do with it.
    present = {f.name for f in dataclasses.fields(TrainingArguments)}
    made = []
    for name, row in LEGACY.items():
        if name not in present:
            moved = row.into or row.act
            text = f"For older scripts. {'Now: ' + row.why if moved else 'No effect: ' + row.why}."
            made.append((name, row.type, dataclasses.field(default=row.default, metadata={"help": text})))
    return made


ADDED: tuple[str, ...] = tuple(name for name, _, _ in _fields())
"""Names of the legacy fields that the installed transformers lacks and that `LegacyArguments` adds."""

if TYPE_CHECKING:

    class LegacyArguments(TrainingArguments):
        """`TrainingArguments` with the legacy fields added."""

else:
    LegacyArguments = dataclasses.make_dataclass(
        "LegacyArguments", _fields(), bases=(TrainingArguments,), repr=False, namespace={"__module__": __name__}
    )


def take_over(config: Any) -> None:
    """Give every legacy value of `config` to the field that has its meaning now, and put the legacy field back to its
    default.

    Emits one FutureWarning for all fields without effect, and one for each renamed GRPO field. ConfigError if both
    names of a field are set, to different values.
    """
    inert = []
    for name in ADDED:
        row, value = LEGACY[name], getattr(config, name)
        if value == row.default or value is None:
            setattr(config, name, row.default)
            continue
        if row.into is not None:
            if row.renamed:
                _refuse_two_values(config, name, value, row.into)
            setattr(config, row.into, value)
        elif row.act is not None:
            row.act(config, value)
        else:
            inert.append(f"{name}={value!r} ({row.why})")
        if row.renamed:
            _say(f"{name} has a new name, {row.into}, which took the value {value!r}; use that name")
    for name in ADDED:
        setattr(config, name, LEGACY[name].default)
    if inert:
        _say(f"these settings have no effect and can go: {'; '.join(inert)}")


def _refuse_two_values(config: Any, old: str, value: Any, new: str) -> None:
    chosen = getattr(config, new)
    default = next(field.default for field in dataclasses.fields(config) if field.name == new)
    if chosen not in (default, value):
        raise ConfigError(
            [f"{old}={value!r} is the earlier name of {new}={chosen!r}: set one of the two, to one value"]
        )


def _say(text: str) -> None:
    # The frames between the user's call and here: _say, take_over, __post_init__, the generated __init__.
    warnings.warn(text, FutureWarning, stacklevel=5)
