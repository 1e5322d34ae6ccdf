"""Makes one small real round: a few prompts are sampled, scored and trained on at a learning rate of 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from groupgrad.cockpit.reading import RunFolder
from groupgrad.telemetry.progress import ProgressCallback
from groupgrad.trainer.batch_findings import FirstBatch
from groupgrad.trainer.run_summary import StartLines

try:
    import resource
except ImportError:  # Windows
    resource = None


@dataclass(slots=True, frozen=True)
class Round:
    """Numbers of a small round."""

    metrics: dict[str, Any]
    """The log event of its step."""
    rows: int
    micro_batch_rows: int
    sample: str
    """A prompt with its completion, shortened."""
    peak_bytes: int
    """The most memory of this process, or of its accelerator, since the process began."""
    total_bytes: int
    """All memory of the machine or accelerator."""


def make_round(trainer: Any, num_prompts: int) -> Round:
    """Makes one round of a trainer, which is of no other use afterwards. Its weights stay as they are.

    Nothing is reported, evaluated or saved. Files go to the trainer's `output_dir`.
    """
    config, plan = trainer.args, trainer.plan
    if not trainer.is_deepspeed_enabled:  # DeepSpeed has read the sizes already
        _set_sizes(config, plan, num_prompts)
    config.max_steps, config.learning_rate = 1, 0.0
    config.lr_scheduler_type, config.lr_scheduler_kwargs = SchedulerType.CONSTANT, {}
    config.logging_strategy, config.logging_steps = IntervalStrategy.STEPS, 1
    config.eval_strategy, config.eval_on_start = IntervalStrategy.NO, False
    config.save_strategy, config.load_best_model_at_end = SaveStrategy.NO, False
    config.resume_from_checkpoint = None
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(StartLines)
    trainer.remove_callback(FirstBatch)
    trainer._start_anew()
    trainer.train()
    event = next(event for event in reversed(trainer.state.log_history) if "step_time" in event)
    peak, total = _memory(config.device)
    plan = trainer.plan
    return Round(
        metrics=event,
        rows=plan.generation_batch_size,
        micro_batch_rows=plan.micro_batch_rows,
        sample=_sample(Path(config.output_dir)),
        peak_bytes=peak,
        total_bytes=total,
    )


def _set_sizes(config: Any, plan: Any, num_prompts: int) -> None:
    """Sets a step of `num_prompts` groups, or a few more where ranks share them, or the run's own if that is less."""
    groups = min(num_prompts, plan.prompts_per_generation)
    while (groups * plan.num_generations) % plan.world_size:
        groups += 1
    rows = groups * plan.num_generations // plan.world_size
    config.per_device_train_batch_size = math.gcd(plan.micro_batch_rows, rows)
    config.gradient_accumulation_steps = rows // config.per_device_train_batch_size
    config.generation_batch_size, config.steps_per_generation = None, config.gradient_accumulation_steps


def _sample(folder: Path, width: int = 160) -> str:
    """Returns the first prompt and completion of the run in a folder; empty if it has stored none."""
    rows = RunFolder(folder).rows(1)
    if not rows:
        return ""
    prompt, completion = (str(rows[0][name]) for name in ("prompt", "completion"))
    return f"{prompt[-width:]!r} is answered by {completion[:width]!r}"


def _memory(device: Any) -> tuple[int, int]:
    """Returns the peak and the total memory in bytes of an accelerator, or of this process and machine."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    peak = psutil.Process().memory_info().rss
    if resource is not None:
        peak = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return peak, psutil.virtual_memory().total
