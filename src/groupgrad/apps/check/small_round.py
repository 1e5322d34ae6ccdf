"""Makes one small real round: a few prompts are sampled, scored and trained on at a learning rate of 0."""

from __future__ import annotations

import itertools
import math
import resource
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from groupgrad import dist
from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.objectives.measure import maximum_where, mean_where
from groupgrad.objectives.mismatch import mismatch_gap
from groupgrad.run_folder.metric_store import MetricStore
from groupgrad.run_folder.progress import ProgressCallback
from groupgrad.scoring.forward import errors_of_passes
from groupgrad.trainer.run_summary import StartLines
from groupgrad.trainer.sampler_logprobs import MISMATCH
from groupgrad.trainer.step_log import FirstBatch


@dataclass(slots=True, frozen=True)
class Usage:
    """Memory that ranks of one machine or accelerator have used, in bytes."""

    place: str
    """Name of the machine, with that of the accelerator if there is one."""
    is_accelerator: bool
    peak_bytes: int
    """The most during the round: the sum over the ranks of each one's peak."""
    before_bytes: int
    """The memory that they had when the round began."""
    total_bytes: int
    """All memory of the machine or accelerator."""
    num_ranks: int = 1


class MemoryWatch:
    """Measures this rank's memory from its creation on: the tensors on an accelerator, on a CPU the whole process."""

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            _forget_peak()
            self._before = psutil.Process().memory_info().rss

    def fullest(self) -> tuple[Usage, int]:
        """Returns the usage of the machine or accelerator that is closest to full, and their number. Collective."""
        host, device = socket.gethostname(), self._device
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            # Each process may see its own device alone, as number 0.
            place, total = f"{host} {getattr(properties, 'uuid', device)}", properties.total_memory
            usage = Usage(place, True, torch.cuda.max_memory_allocated(device), self._before, total)
        else:
            usage = Usage(host, False, _peak_bytes(), self._before, psutil.virtual_memory().total)
        return fullest(dist.all_gather_objects(usage))


def fullest(usages: Iterable[Usage]) -> tuple[Usage, int]:
    """Adds the usages of ranks by their place; returns the one that is closest to full, and the number of places."""
    places: dict[str, Usage] = {}
    for usage in usages:
        usage_there = places.get(usage.place)
        if usage_there is not None:
            usage = replace(
                usage,
                peak_bytes=usage_there.peak_bytes + usage.peak_bytes,
                before_bytes=usage_there.before_bytes + usage.before_bytes,
                num_ranks=usage_there.num_ranks + usage.num_ranks,
            )
        places[usage.place] = usage
    return max(places.values(), key=lambda usage: usage.peak_bytes / usage.total_bytes), len(places)


def _forget_peak() -> None:
    """Resets this process's peak memory to its present memory; does nothing outside Linux."""
    with suppress(OSError):  # then the peak since its start counts, an upper bound
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Returns the most resident memory of this process since `_forget_peak`."""
    present = psutil.Process().memory_info()
    unit = 1 if sys.platform == "darwin" else 1024
    return max(present.rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


DIFFERENCE = "sampling/sampling_logp_difference/mean"
"""Key of the mean distance (nats) between the log-probs of trainer and sampler."""


@dataclass(slots=True, frozen=True)
class Round:
    """Numbers of a small round."""

    metrics: dict[str, Any]
    """The log event of its step."""
    rows: int
    micro_batch_rows: int
    sample: str
    """A prompt with its completion, shortened."""
    memory: Usage
    """Memory of the machine or accelerator that was closest to full."""
    num_places: int = 1
    """Number of machines or accelerators."""
    group_rewards: list[float] = field(default_factory=list)
    """Mean reward of each group that was scored, over all ranks."""


def make_round(trainer: Any, num_prompts: int) -> Round:
    """Makes one round of a trainer, which is of no other use afterwards. Its weights stay as they are. Collective.

    Nothing is reported, evaluated or saved. Files go to the trainer's `output_dir`.
    """
    config, plan = trainer.args, trainer.plan
    _set_sizes(config, plan, num_prompts)
    config.max_steps, config.learning_rate = 1, 0.0
    config.lr_scheduler_type, config.lr_scheduler_kwargs = SchedulerType.CONSTANT, {}
    config.logging_strategy, config.logging_steps = IntervalStrategy.STEPS, 1
    config.eval_strategy, config.eval_on_start = IntervalStrategy.NO, False
    config.save_strategy, config.load_best_model_at_end = SaveStrategy.NO, False
    config.resume_from_checkpoint = None
    if trainer.is_deepspeed_enabled:
        _tell_deepspeed(trainer)
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(StartLines)
    trainer.remove_callback(FirstBatch)
    comparison = _Comparison(trainer)
    trainer.add_callback(comparison)
    trainer._start_anew()
    watch = MemoryWatch(config.device)
    trainer.train()
    event = next(event for event in reversed(trainer.state.log_history) if "step_time" in event)
    memory, num_places = watch.fullest()
    plan = trainer.plan
    return Round(
        metrics={**event, **comparison.numbers(event)},
        rows=plan.generation_batch_size,
        micro_batch_rows=plan.micro_batch_rows,
        sample=_sample(Path(config.output_dir)),
        memory=memory,
        num_places=num_places,
        group_rewards=comparison.group_rewards,
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


def _tell_deepspeed(trainer: Any) -> None:
    """Replaces the sizes and the learning rate of the run, which DeepSpeed's configuration has been filled with."""
    config, settings = trainer.args, trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    rows, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    values = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": rows * accumulation * config.world_size,
        "optimizer.params.lr": config.learning_rate,
        "scheduler.params.warmup_min_lr": config.learning_rate,
        "scheduler.params.warmup_max_lr": config.learning_rate,
    }
    for key, value in values.items():
        parent, name = settings.find_config_node(key)
        if parent is not None and name in parent:
            parent[name] = value


class _Comparison(TrainerCallback):
    """Scores all that the round has sampled, compares the log-probs with the sampler's, and keeps the groups' rewards.

    Training measures log-probs only where the sampler is exact and a row has a gradient.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._gap: dict[str, float] = {}
        self.group_rewards: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the comparison. Collective. The step's times have been taken already."""
        store, scorer = MetricStore(), self._trainer.components.scorer
        for experience in self._trainer._step_log.experiences:
            batch = experience.batch
            with errors_of_passes(self._trainer.model):
                scores = scorer.policy(batch, rows_per_pass=self._trainer.plan.micro_batch_rows)
            if batch.sampling_logprobs is not None:
                gap = mismatch_gap(scores.logprobs, batch.sampling_logprobs, batch)
                distance = gap.values.abs()
                store.add({MISMATCH: maximum_where(distance, gap.measured)})
                store.add({DIFFERENCE: mean_where(distance, gap.measured)})
        self._gap = store.flush()
        self.group_rewards = self._mean_of_groups()

    def _mean_of_groups(self) -> list[float]:
        """The mean reward of each group with a reward. Collective, since ranks may share a group."""
        size, groups = self._trainer.plan.num_generations, defaultdict(list)
        rows = [
            (rollout.index // size, reward)
            for experience in self._trainer._step_log.experiences
            for rollout, reward in zip(experience.rollouts, experience.combined_rewards)
        ]
        for group, reward in itertools.chain(*dist.all_gather_objects(rows)):
            if not math.isnan(reward):
                groups[group].append(reward)
        return [sum(rewards) / len(rewards) for rewards in groups.values()]

    def numbers(self, event: dict[str, Any]) -> dict[str, float]:
        """Returns the largest gap of a sampler that is exact, of others the mean one, unless `event` has it."""
        if not self._gap:
            return {}
        if self._trainer.components.collector.rollouts.is_exact:
            return {MISMATCH: max(self._gap[MISMATCH], event.get(MISMATCH, 0.0))}
        return {DIFFERENCE: event.get(DIFFERENCE, self._gap[DIFFERENCE])}


def _sample(folder: Path, width: int = 160) -> str:
    """Returns the first prompt and completion of the run in a folder; empty if it has stored none."""
    rows = RunFolder(folder).rows(1)
    if not rows:
        return ""
    prompt, completion = (str(rows[0][name]) for name in ("prompt", "completion"))
    return f"{prompt[-width:]!r} is answered by {completion[:width]!r}"
