"""Fields of earlier releases that scripts may still set.

transformers 5 dropped many `TrainingArguments` fields, and some GRPO fields were renamed. `LEGACY` lists them all, and
`LegacyArguments` makes them fields again. `take_over` moves each value to the field that replaces it and resets the
old one to its default, so that a copy of a config has everything once.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from groupgrad.config.field_rules import changed
from groupgrad.errors import ConfigError


@dataclass(slots=True, frozen=True)
class Legacy:
    """One field of an earlier release."""

    type: Any
    default: Any
    why: str = ""
    """The reason why it has no effect, or what `act` sets."""
    into: str | None = None
    """Field that receives the value."""
    act: Callable[[Any, Any], None] | None = None
    """Called with the config and the value, for what a plain renaming cannot do."""
    renamed: bool = False
    """True for a GRPO field with a new name, whose use emits a warning."""

    def field(self) -> Any:
        """Returns the dataclass field, whose help says what it does now."""
        use = f"Now: {self.into or self.why}" if self.into or self.act else f"No effect: {self.why}"
        return dataclasses.field(default=self.default, metadata={"help": f"For older scripts. {use}."})


def _warmup_ratio(config: Any, ratio: float) -> None:
    # A count of steps always had precedence over the ratio. A fraction is the same quantity, and the ratio wins.
    if not 0 <= ratio <= 1:
        raise ConfigError([f"warmup_ratio={ratio} is a share of the steps. Set warmup_steps to a number from 0 to 1"])
    if config.warmup_steps >= 1:
        _warn(f"warmup_ratio={ratio} is not used, because warmup_steps={config.warmup_steps} is set too")
    else:
        config.warmup_steps = ratio


def _logging_dir(config: Any, path: str) -> None:
    os.environ["TENSORBOARD_LOGGING_DIR"] = os.path.expanduser(path)


def _hub_model_id(config: Any, name: str) -> None:
    organization = config.push_to_hub_organization
    config.hub_model_id = f"{organization}/{name}" if organization and "/" not in name else name


def _hub_organization(config: Any, organization: str) -> None:
    # Without a model name the repository is named after the output folder.
    if config.hub_model_id is None:
        _hub_model_id(config, os.path.basename(os.path.normpath(config.output_dir or "trainer_output")))


def _torchdynamo(config: Any, engine: str) -> None:
    config.torch_compile = True
    config.torch_compile_backend = config.torch_compile_backend or engine


_str, _int, _bool = str | None, int | None, bool | None

LEGACY: dict[str, Legacy] = {
    # --- dropped by transformers 5, still meaningful ---
    "per_gpu_train_batch_size": Legacy(_int, None, into="per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Legacy(_int, None, into="per_device_eval_batch_size"),
    "warmup_ratio": Legacy(float, 0.0, "a fraction given as warmup_steps", act=_warmup_ratio),
    "logging_dir": Legacy(_str, None, "the TENSORBOARD_LOGGING_DIR environment variable", act=_logging_dir),
    "no_cuda": Legacy(bool, False, into="use_cpu"),
    "adafactor": Legacy(bool, False, "optim='adafactor'", act=lambda config, _: setattr(config, "optim", "adafactor")),
    "push_to_hub_model_id": Legacy(_str, None, "hub_model_id", act=_hub_model_id),
    "push_to_hub_organization": Legacy(_str, None, "the owner in hub_model_id", act=_hub_organization),
    "push_to_hub_token": Legacy(_str, None, into="hub_token"),
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
    # --- GRPO fields with a new name, or without meaning today ---
    "use_liger_loss": Legacy(_bool, None, into="use_liger_kernel", renamed=True),
    "wandb_log_unique_prompts": Legacy(_bool, None, into="log_unique_prompts", renamed=True),
    "vllm_guided_decoding_regex": Legacy(_str, None, into="vllm_structured_outputs_regex", renamed=True),
    "vllm_importance_sampling_cap": Legacy(float | None, 3.0, into="vllm_importance_sampling_clip_max", renamed=True),
    "use_transformers_paged": Legacy(bool, False, into="use_transformers_continuous_batching", renamed=True),
    "vllm_max_model_len": Legacy(_int, None, into="vllm_max_model_length", renamed=True),
    "vllm_device": Legacy(_str, None, "in colocate mode vLLM uses the trainer's devices, in server mode the server's"),
    "vllm_dtype": Legacy(_str, None, "vLLM computes in the type that training computes in"),
    "vllm_enable_prefix_caching": Legacy(bool, True, "it is on wherever the model allows it"),
    "max_prompt_length": Legacy(
        _int, None, "prompts are never cut; filter the data set before training, by the length you want"
    ),
}


if TYPE_CHECKING:

    class LegacyArguments(TrainingArguments):
        """`TrainingArguments` with the legacy fields added."""

else:
    LegacyArguments = dataclasses.make_dataclass(
        "LegacyArguments",
        [(name, row.type, row.field()) for name, row in LEGACY.items()],
        bases=(TrainingArguments,),
        repr=False,
        namespace={"__module__": __name__},
    )


def take_over(config: Any) -> None:
    """Moves every legacy value of `config` to the field that replaces it, and resets the legacy field to its default.

    Emits one FutureWarning for all fields without effect, and one for each renamed GRPO field. ConfigError if both
    names of a field are set, to different values.
    """
    inert = []
    for name in changed(config, LEGACY):
        row, value = LEGACY[name], getattr(config, name)
        if value is None:
            continue
        if row.into is not None:
            if row.renamed:
                if changed(config, [row.into]) and getattr(config, row.into) != value:
                    one, other = f"{name}={value!r}", f"{row.into}={getattr(config, row.into)!r}"
                    raise ConfigError([f"{one} is the earlier name of {other}: set one of the two, to one value"])
                _warn(f"{name} has a new name, {row.into}, which took the value {value!r}; use that name")
            setattr(config, row.into, value)
        elif row.act is not None:
            row.act(config, value)
        else:
            inert.append(f"{name}={value!r} ({row.why})")
    # Only now, since the two fields of a hub repository's name read each other. An older transformers still reads some
    # of these fields, with a default of its own for "unset".
    unset = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for name, row in LEGACY.items():
        setattr(config, name, unset.get(name, row.default))
    if inert:
        _warn(f"these settings have no effect and can go: {'; '.join(inert)}")


def _warn(text: str) -> None:
    # The frames between the user's call and here: _warn, take_over, __post_init__, the generated __init__.
    warnings.warn(text, FutureWarning, stacklevel=5)
