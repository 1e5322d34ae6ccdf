"""Describes a run before it begins: its configuration, and in words data, batches, prompts, end tokens, precision."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from groupgrad import compat, dist
from groupgrad.config.grpo_config import without_secrets
from groupgrad.data.columns import is_transformed
from groupgrad.data.completions import THINK, opened_by
from groupgrad.data.images import COLUMNS as IMAGE_COLUMNS
from groupgrad.kernels.compile import status_so_far
from groupgrad.models.adapters import adapter_settings
from groupgrad.models.load import inner_tokenizer
from groupgrad.models.model_names import model_source
from groupgrad.models.quantized import quantization_settings
from groupgrad.models.unwrapping import unwrap
from groupgrad.run_folder.advice import Finding
from groupgrad.run_folder.terminal import write_line
from groupgrad.scoring.fused_modules import computes_in_float32

PROMPTS_AT_START = 64
SECONDS_AT_START = 0.05
"""Prompts that are tokenized for the lines at the start of training, and the time after which no further one is."""
DECODING = "decoding"


@dataclass(slots=True, frozen=True)
class PromptLengths:
    """Lengths in tokens of some prompts of a data set."""

    lengths: Sequence[int]
    is_all: bool
    """True if `lengths` covers all prompts of the data set."""

    def __str__(self) -> str:
        if not self.lengths:
            return "not measured here: they are made while the run reads or samples them, or have images"
        low, high = min(self.lengths), max(self.lengths)
        share = "" if self.is_all else f", of {len(self.lengths):,} that were measured"
        spread = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return f"{spread} tokens (median {statistics.median_low(self.lengths):,}{share})"


class StartLines(TrainerCallback):
    """Prints columns, batches, prompts and end of completions when training begins, then how the first batch ran.

    The same lines are printed once.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._printed: tuple[str, str, str] | None = None
        self._width = 0
        self._tells_decoding = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the lines on the main process, above the progress bar."""
        if not state.is_world_process_zero:
            return
        # A run that is paused and resumed many times would spend its time on measuring prompts.
        lines = columns_in_words(self._trainer), batch_in_words(self._trainer.plan), ending_in_words(self._trainer)
        if lines != self._printed:
            self._printed, self._tells_decoding = lines, True
            rows = start_rows(self._trainer)
            self._width = max(map(len, (*rows, DECODING)))
            self._write(rows)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints, once a generation batch was sampled, how decode steps have run: a trial may have run otherwise."""
        if self._tells_decoding and (path := path_of_step(self._trainer)):
            self._tells_decoding = False
            self._write({DECODING: f"{self._trainer.execution.engine_choice.name} engine, steps run {path}"})

    on_step_end = on_substep_end

    def _write(self, rows: Mapping[str, str]) -> None:
        write_line("\n".join(f"{name:<{self._width}}  {text}" for name, text in rows.items()))


def path_of_step(trainer: Any) -> str:
    """Returns how the engine ran decode steps of the present step's generation batch, and why not faster.

    Empty where the step has sampled none, or where a rollout function did, perhaps by other means.
    """
    sampled = trainer._step_log.experiences and trainer.rollout_components.function is None
    return trainer.engine.path if sampled else ""


def start_rows(trainer: Any) -> dict[str, str]:
    """Returns the lines that are printed when training begins, by their names."""
    lengths = prompt_lengths(trainer, PROMPTS_AT_START, seconds=SECONDS_AT_START)
    rows = {
        "columns": columns_in_words(trainer),
        "batch": batch_in_words(trainer.plan),
        "prompts": str(lengths),
        "ending": ending_in_words(trainer),
    }
    rows |= old_logprobs_row(trainer)
    if (precision := half_precision(trainer)) is not None:
        rows[precision.topic] = " ".join(filter(None, (precision.text, precision.setting)))
    return rows


def old_logprobs_row(trainer: Any) -> dict[str, str]:
    """Returns where old log-probs come from; nothing if a step's own passes give them."""
    if trainer.plan.is_on_policy:
        return {}
    return {"old log-probs": trainer.sampler_logprobs.old_in_words(trainer.execution.engine_choice.gap)}


def sampling_settings(trainer: Any) -> dict[str, Any]:
    """Returns the engine, where old log-probs come from, and how far the engine's are from training's, for a record."""
    choice, old = trainer.execution.engine_choice, None
    if not trainer.plan.is_on_policy:
        old = "sampling" if trainer.sampler_logprobs.are_old else "training"
    return {"engine": choice.name, "old_logprobs": old, "logp_gap": choice.gap}


def run_configuration(
    trainer: Any, command: Mapping[str, Any] | None, data: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns what `run_config.json` holds: settings without secrets, model, rewards, versions, digest of the data."""
    model = unwrap(trainer.model)
    return {
        "format": 1,
        "started": time.time(),
        "max_steps": trainer.state.max_steps,
        "processes": dist.world_size(),
        "model": model_source(model) or type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": quantization_settings(model),
        "adapter": adapter_settings(model),
        "rewards": list(trainer.rewards.names),
        "reward_functions": trainer.rewards.origins,
        "eval_reward_functions": None if trainer.eval_rewards is trainer.rewards else trainer.eval_rewards.origins,
        "versions": versions_in_use(),
        "threads": torch.get_num_threads(),
        "sampling": sampling_settings(trainer),
        "data": data,
        "command": command,
        "settings": without_secrets(trainer.args.to_dict()),
    }


def versions_in_use() -> dict[str, str]:
    """Returns versions and devices of this machine, and the kernels for CPUs: each may change the bits of a run."""
    return {**compat.environment(), "CPU kernels": status_so_far()}


def columns_in_words(trainer: Any, names: Sequence[str] | None = None) -> str:
    """Returns which columns prompts are made of, which ones reward functions name, and which are left.

    `names` are the data set's columns; None: those that are known without reading a row.
    """
    dataset, environments = trainer.train_dataset, trainer.rollout_components.environments
    if names is None and not (isinstance(dataset, Dataset) and is_transformed(dataset)):
        names = dataset.column_names
    if not names:
        return "they are made while rows are read"
    of_prompt = [name for name in ("prompt", *IMAGE_COLUMNS) if name in names]
    named, others = ([name for name in part if name not in of_prompt] for part in trainer.rewards.columns_read(names))
    text = f"prompts are made of {', '.join(of_prompt)}; " if of_prompt else ""
    text += f"reward functions name {', '.join(named) or 'no other'}"
    if others:
        text += f", and get {', '.join(others)} by **kwargs"
    if environments is not None:
        return f"environments get all; {text}"
    if trainer.rollout_components.program is not None:
        return f"the agent gets all; {text}"
    unused = ", ".join(name for name in names if name not in (*of_prompt, *named, *others))
    return f"{text}; nothing uses {unused}" if unused else text


def data_in_words(trainer: Any) -> str:
    """Returns the number of prompts to train on and to evaluate on."""
    rows = [_count(trainer.train_dataset, "to train on")]
    held_out = trainer.eval_dataset
    for name, dataset in held_out.items() if isinstance(held_out, dict) else [("", held_out)]:
        if dataset is not None:
            rows.append(_count(dataset, f"to evaluate on{f' ({name})' if name else ''}"))
    return "; ".join(rows)


def batch_in_words(plan: Any) -> str:
    """Returns the sizes of an optimizer step and of a generation batch, with the arithmetic behind them."""
    step = plan.micro_batch_rows * plan.accumulation * plan.world_size
    micro_batches = "micro-batch" if plan.accumulation == 1 else "micro-batches"
    processes = "process" if plan.world_size == 1 else "processes"
    times = "once" if plan.num_iterations == 1 else f"{plan.num_iterations} times"
    return (
        f"an optimizer step trains {step:,} completions ({plan.micro_batch_rows} a micro-batch x {plan.accumulation} "
        f"{micro_batches} x {plan.world_size} {processes}); {plan.generation_batch_size:,} are sampled at a time, "
        f"{plan.num_generations} for each of {plan.prompts_per_generation:,} prompts, and trained on {times}"
    )


def steps_in_words(trainer: Any) -> str:
    """Returns the number of optimizer steps, and the prompts that they use."""
    config, plan = trainer.args, trainer.plan
    per_step = plan.accumulation * plan.prompts_per_generation / plan.micro_batches_per_generation
    if not isinstance(trainer.train_dataset, Sized):
        return f"{config.max_steps:,}"
    steps = trainer.set_initial_training_values(config, trainer.get_train_dataloader())[-1]
    used = steps * per_step
    return f"{steps:,}, which use {used:,.0f} prompts ({used / len(trainer.train_dataset):.2g} epochs)"


def ending_in_words(trainer: Any) -> str:
    """Returns how prompts become tokens, and the tokens and the length that end a completion."""
    tokenizer = inner_tokenizer(trainer.prompt_maker.tokenizer)
    end_ids = list(trainer.components.sampling.eos_ids)
    ends = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(end_ids)))
    limit = f"at most {trainer.components.sampling.max_new_tokens:,} tokens"
    ending = f"completions end with {ends}, or after {limit}" if ends else f"completions have no end token, so {limit}"
    return f"{template_in_words(trainer)}; {ending}"


def template_in_words(trainer: Any) -> str:
    """Returns how the data set's prompts become tokens, judged by the first of them."""
    first = first_prompt(trainer.train_dataset)
    if first is None:
        return "prompts are made while they are read"
    if isinstance(first, str):
        return "prompts are texts, given as they are"
    return f"prompts go through the chat template{thinking_in_words(trainer)}"


def thinking_in_words(trainer: Any) -> str:
    """Returns what the chat template opens or closes of a turn's reasoning; empty if it leaves that to the model."""
    tokenizer = inner_tokenizer(trainer.prompt_maker.tokenizer)
    try:
        prompt = trainer.prompt_maker.render([{"role": "user", "content": "a"}])
    except Exception:  # templates raise anything, such as for a conversation that they do not expect
        prompt = ""
    if opened_by(prompt):
        return (
            f", which opens {THINK!r}: completions begin behind it (think rewards count it, and a function that names "
            "`raw_completions` gets it)"
        )
    text = (
        f", which writes an empty {THINK!r} block before each completion"
        if prompt.rstrip().endswith("</think>")
        else ""
    )
    if THINK in tokenizer.all_special_tokens and not trainer.args.special_tokens_in_completions:
        text += (
            f"; {THINK!r} is a special token, which the texts of completions lack (think rewards count it; "
            "special_tokens_in_completions=True keeps it)"
        )
    return text


def prompt_lengths(trainer: Any, at_most: int, *, seconds: float = float("inf")) -> PromptLengths:
    """Returns the lengths of prompts drawn at random, always the same ones.

    There are none of a stream, of rows that a function computes, and of agents, whose prompts get the tools' schemas
    while they are sampled. No further prompt is measured after some `seconds`.
    """
    dataset, maker, rollouts = trainer.train_dataset, trainer.prompt_maker, trainer.rollout_components
    if not _can_be_measured(dataset) or rollouts.chat is not None or rollouts.function is not None:
        return PromptLengths([], is_all=False)
    chosen = range(len(dataset))
    if len(chosen) > at_most:
        chosen = sorted(random.Random(0).sample(chosen, at_most))
    lengths: list[int] = []
    started = time.perf_counter()
    columns = [name for name in ("prompt", "image", "images") if name in dataset.column_names]
    if len(columns) > 1 and seconds < float("inf"):  # decoding images would take longer than the lines are worth
        return PromptLengths([], is_all=False)
    rows = dataset.select_columns(columns)
    for index in chosen:
        lengths.append(maker.num_tokens(rows[index]))
        if time.perf_counter() - started > seconds:
            break
    return PromptLengths(lengths, is_all=len(lengths) == len(dataset))


def _can_be_measured(dataset: Any) -> bool:
    return isinstance(dataset, Dataset) and not is_transformed(dataset) and "prompt" in dataset.column_names


def first_prompt(dataset: Any) -> Any:
    """Returns the first prompt, a text or messages; None if rows are made while they are read."""
    if not _can_be_measured(dataset):
        return None
    return dataset.select_columns("prompt")[0]["prompt"]


def _count(dataset: Any, use: str) -> str:
    return f"{len(dataset):,} prompts {use}" if isinstance(dataset, Sized) else f"a stream of prompts {use}"


def half_precision(trainer: Any) -> Finding | None:
    """Returns a warning of half precision on a CPU in which the compiled kernels do not run; None for other runs."""
    weights, mixed = unwrap(trainer.model).dtype, trainer.accelerator.mixed_precision
    if trainer.accelerator.device.type != "cpu" or (mixed == "no" and computes_in_float32(trainer.model)):
        return None
    if weights in (torch.bfloat16, torch.float16):
        what = f"weights in {str(weights).removeprefix('torch.')}"
        mend = "Set bf16=False" if mixed == "bf16" else "Load the model with dtype='float32'"
    elif mixed in ("bf16", "fp16"):
        what, mend = f"{mixed}=True", f"Set {mixed}=False"
    else:
        return None
    text = f"{what}: on a CPU this model runs without the compiled kernels then, which most processors do slower."
    return Finding("precision", text, "warning", f"{mend} if memory allows.")
