"""Trains what papers claim on a tiny model, ten seeds each, and says which claims it shows: `make papers`.

The model is that of `groupgrad demo --tiny`, warmed up on careless demonstrations of a sum in steps. With `--model
real` it is SmolLM2-135M-Instruct on the sums of `groupgrad demo`, three seeds each (`make papers-real`). The arms of a
study start from the same weights, see the same prompts in the same order, and end when they have spent the same number
of tokens; only what a study is about differs. A claim is shown if the paired difference over the seeds has its sign,
with p < 0.05 by Student's t. What is not shown at this size may still hold at the paper's.

A finished arm is a line of `results.jsonl`, and a later call goes on with the arms that are missing. The pages are
`recipes/papers.md` and `recipes/papers-real.md`, the pictures `docs/papers.png` and `docs/papers-real.png`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from arms import finished, interval, start_process
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.demo import pretrained
from groupgrad.apps.demo.run import ON_A_CPU, WARM_UP_STEPS
from groupgrad.apps.demo.task import MAX_COMPLETION_LENGTH, correctness_reward, make_model, make_splits, make_tokenizer
from groupgrad.apps.demo.task import warm_up as warm_up_on
from groupgrad.evaluation.statistics import student_quantile, student_tail

ROOT = Path(__file__).parents[1]
TRIES = 16
"""Answers to each held-out prompt: pass@1 and pass@16 are over these."""
JOBS = 2
"""Arms that are trained side by side."""
AT_EQUAL_PASS_1 = "pass@16 at equal pass@1"
"""The measure that is read off curves; the others are those of the last evaluation."""
NOISE = 0.02
"""Standard deviation of the noise on the sampler's weights, in that of each weight tensor."""
TURNS, LAST = 10, 9
"""Turns of a walk, and the last of its places, which begin at 0."""


class Model(NamedTuple):
    """What arms train, how long, and what all of them set."""

    title: str
    about: str
    seeds: int
    held_out: int
    """Held-out prompts."""
    evaluations: int
    """Of arms whose curves are compared: at equal parts of the tokens, after the one at the start. Others have the
    last one alone."""
    reward: Any
    settings: dict[str, Any]
    rows: float = 1.0
    """Rows of a pass, in those that a study names."""
    tokens: int | None = None
    """That an arm may spend; None: what its study says."""
    page: str = "papers"


MODELS = {
    "tiny": Model(
        "a tiny model",
        "The model is that of `groupgrad demo --tiny`, 130,000 parameters, which adds four\ndigits in written steps; "
        "for turns it walks on a line. For pass@16 it is warmed up for 150 steps, not\n"
        f"{WARM_UP_STEPS}, so that there is room above; it walks without a warm-up.",
        seeds=10,
        held_out=64,
        evaluations=6,
        reward=correctness_reward,
        settings={
            "per_device_train_batch_size": 256,
            "num_generations": 16,
            "max_completion_length": MAX_COMPLETION_LENGTH,
            "learning_rate": 3e-4,
            "adam_beta2": 0.98,
        },
    ),
    "real": Model(
        "SmolLM2-135M-Instruct",
        'The model is that of `groupgrad demo`, SmolLM2-135M-Instruct, which is asked "What is 47 +\n36?" and the like '
        "and rewarded if the last number of its answer is right. The claim about turns is left out: a turn\nof its "
        "walk is one character of the tiny model's. Three seeds tell large differences alone.",
        seeds=3,
        held_out=24,
        evaluations=2,
        reward=pretrained.last_number_is_right,
        settings={
            "per_device_train_batch_size": 32,
            "num_generations": 8,
            "max_completion_length": 32,
            "learning_rate": 1e-5,
        },
        rows=1 / 8,
        tokens=16_000,
        page="papers-real",
    ),
}


class Arm(NamedTuple):
    """One run."""

    study: str
    label: str
    seed: int


@dataclass(frozen=True)
class Study:
    """A claim of a paper: a measure of the first arm is above (or below) that of the second."""

    claim: str
    paper: str
    arms: dict[str, dict[str, Any]]
    """Label -> settings; of the claim's two arms the first one comes first."""
    measure: str
    """The number of a result that is compared."""
    sign: int = 1
    """1: the first arm is above the second; -1: below."""
    shared: dict[str, Any] = field(default_factory=dict)
    tokens: int = 250_000
    walks: bool = False
    """The task is a walk of several turns instead of sums."""
    warm_up: int = WARM_UP_STEPS
    """Steps of the warm-up. With fewer of them pass@16 leaves room above; without any a walk is explored."""
    noisy: bool = False
    """The sampler's weights have noise, as those of another engine or precision have."""

    @property
    def compares_curves(self) -> bool:
        return self.measure == AT_EQUAL_PASS_1


STUDIES: dict[str, Study] = {
    "dppo": Study(
        "under a noisy sampler and stale samples, DPPO ends above CISPO",
        "2602.04879",
        {"dppo_tv": {"loss_type": "dppo_tv"}, "cispo": {"loss_type": "cispo", "epsilon_high": 5.0}},
        "pass@1",
        shared={"steps_per_generation": 8, "per_device_train_batch_size": 32},
        noisy=True,
    ),
    "maxrl": Study(
        "at equal pass@1, MaxRL has the higher pass@16",
        "2602.02710",
        {
            "maxrl": {"loss_type": "dr_grpo", "advantage_estimator": "maxrl"},
            "group": {"loss_type": "dr_grpo", "scale_rewards": "none"},
        },
        AT_EQUAL_PASS_1,
        tokens=500_000,
        warm_up=150,
    ),
    "pass_at_k": Study(
        "at equal pass@1, pass@4 advantages have the higher pass@16",
        "2505.15201",
        {
            "pass_at_k": {
                "loss_type": "dr_grpo",
                "advantage_estimator": "pass_at_k",
                "advantage_settings": {"k": 4},
            },
            "group": {"loss_type": "dr_grpo", "scale_rewards": "none"},
        },
        AT_EQUAL_PASS_1,
        tokens=500_000,
        warm_up=150,
    ),
    "dr_grpo": Study(
        "Dr. GRPO answers in fewer tokens than GRPO",
        "2503.20783",
        {"dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"}, "grpo": {"loss_type": "grpo"}},
        "length",
        sign=-1,
    ),
    "clip_higher": Study(
        "a higher upper clip keeps the entropy higher",
        "2503.14476",
        {"dapo, 0.28": {"epsilon_high": 0.28}, "dapo, 0.2": {}},
        "entropy",
        shared={"steps_per_generation": 4, "per_device_train_batch_size": 64},
    ),
    "clip_cov": Study(
        "Clip-Cov keeps the entropy higher",
        "2505.22617",
        {
            "clip_cov": {"loss_type": "clip_cov", "loss_settings": {"share": 0.002, "low": 0.5, "high": 50.0}},
            "dapo": {},
        },
        "entropy",
        shared={"steps_per_generation": 4, "per_device_train_batch_size": 64},
    ),
    "gmpo": Study(
        "GMPO's ratios stay in a narrower range",
        "2507.20673",
        {"gmpo": {"loss_type": "gmpo"}, "grpo": {"loss_type": "grpo"}},
        "range of log-ratios",
        sign=-1,
        shared={"steps_per_generation": 4, "per_device_train_batch_size": 64},
    ),
    "gigpo": Study(
        "on walks of ten turns, GiGPO ends above advantages of whole episodes",
        "2505.10978",
        {"gigpo": {"advantage_estimator": "gigpo"}, "group": {}},
        "pass@1",
        shared={"max_completion_length": 64, "learning_rate": 3e-3},
        tokens=45_000,
        walks=True,
        warm_up=0,
    ),
}


class Spent(TrainerCallback):
    """Evaluates at equal parts of the tokens that a run may spend, and ends it with them."""

    def __init__(self, tokens: int, evaluations: int) -> None:
        self.left = [tokens * number / evaluations for number in range(1, evaluations + 1)]
        self.curve: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.steps_per_generation_resolved == 0:
            while self.left and state.num_input_tokens_seen >= self.left[0]:
                control.should_evaluate, self.left = True, self.left[1:]
            control.should_training_stop = not self.left

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        point = {"tokens": state.num_input_tokens_seen, "length": metrics["eval_completions/mean_length"]}
        self.curve.append(point | {key: metrics[f"eval_{key}"] for key in ("pass@1", "pass@16", "entropy")})


class Measured(GRPOTrainer):
    """A trainer that notes the range of the log-ratios of each step's tokens."""

    ranges: list[float]

    def batch_loss(self, model: Any, batch: Any, **known: Any) -> Any:
        result = super().batch_loss(model, batch, **known)
        for terms in result.token_terms:
            logs = terms.values["ratio"][batch.trained].log()
            if len(logs):
                self.ranges.append(float(logs.max() - logs.min()))
        return result


def with_noise(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """Completions of the policy with noise on its weights, with the log-probs that the noisy policy gave them."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    kept = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    try:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += NOISE * noise * parameter.std().nan_to_num(0.0)
        return trainer.sample_completions(prompts)
    finally:
        with torch.no_grad():
            for parameter, values in zip(trainer.model.parameters(), kept):
                parameter.copy_(values)


def sight(here: int, goal: int) -> str:
    """The text that the model reads: its place, a plus if the goal is above, the goal."""
    return f"{here}{'+' if goal > here else ' '}{goal}="


def walk(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """Walks of `TURNS` turns. A turn is one token: a digit up to 4 is a step down, another digit one up.

    After each turn the model reads where it is again. A walk is won once it has been at the goal.
    """
    tokenizer: Any = trainer.processing_class
    places = [(int(prompt[0]), int(prompt[2])) for prompt in prompts]
    here, goals = [list(column) for column in zip(*places)]
    first = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    ids, masks, won = [[] for _ in prompts], [[] for _ in prompts], [False] * len(prompts)
    for turn in range(TURNS):
        texts = [tokenizer.decode(prompt + done, skip_special_tokens=False) for prompt, done in zip(first, ids)]
        answer = trainer.sample_completions(texts, max_new_tokens=1)
        for row, (given, sampled) in enumerate(zip(answer["prompt_ids"], answer["completion_ids"])):
            assert given == first[row] + ids[row], "the text of a walk has other tokens than the walk"
            text = tokenizer.decode(sampled)
            here[row] += 0 if not text.isdigit() else 1 if int(text) > 4 else -1
            here[row] = min(max(here[row], 0), LAST)
            won[row] |= here[row] == goals[row]
            read = tokenizer(sight(here[row], goals[row]))["input_ids"] if turn < TURNS - 1 else []
            ids[row] += sampled + read
            masks[row] += [1] * len(sampled) + [0] * len(read)
    return {"prompt_ids": first, "completion_ids": ids, "env_mask": masks, "logprobs": None, "won": won}


def reached(won: list[bool], **_: Any) -> list[float]:
    """1 for a walk that was at its goal."""
    return [float(each) for each in won]


@lru_cache
def base(name: str, seed: int, warm_up: int) -> tuple[Any, Any]:
    """The model that the arms of a seed start from, and its tokenizer."""
    if name == "real":
        return pretrained.load()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    warm_up_on(model, tokenizer, make_splits(seed).warm_up, num_steps=warm_up, seed=seed)
    return model, tokenizer


def data(name: str, study: Study, seed: int) -> tuple[Dataset, Dataset]:
    """The prompts of training, and those that are held out."""
    num_held_out = MODELS[name].held_out
    if name == "real":
        questions, held_out = pretrained.make_splits(seed)
        return questions, held_out.select(range(num_held_out))
    if not study.walks:
        splits = make_splits(seed, num_held_out=num_held_out)
        return tuple(Dataset.from_list([one.row() for one in part]) for part in (splits.grpo, splits.held_out))
    stream = random.Random(f"walks/{seed}")
    pairs = [(start, goal) for start in range(LAST + 1) for goal in range(LAST + 1) if abs(start - goal) > 2]
    stream.shuffle(pairs)
    rows = [{"prompt": sight(start, goal)} for start, goal in pairs]
    return Dataset.from_list(rows[:-12]), Dataset.from_list(rows[-12:])


def make_config(name: str, arm: Arm, num_held_out: int, folder: Path) -> GRPOConfig:
    """What all arms share, and what the study and the arm set."""
    study, rows = STUDIES[arm.study], "per_device_train_batch_size"
    shared = dict(study.shared)
    if rows in shared:
        shared[rows] = round(shared[rows] * MODELS[name].rows)
    settings: dict[str, Any] = {
        **ON_A_CPU,
        "output_dir": str(folder / "-".join(map(str, arm)).replace(", ", "_")),
        "seed": arm.seed,
        "max_steps": 100_000,  # the tokens end the run
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 1_000_000,
        "eval_on_start": study.compares_curves,
        "per_device_eval_batch_size": TRIES * num_held_out,
        "eval_sampling": {"num_generations": TRIES},
        "eval_k": [1, TRIES],
        "disable_tqdm": True,
    }
    return GRPOConfig(**settings | MODELS[name].settings | shared | study.arms[arm.label])


def train(name: str, arm: Arm, tokens: int | None, folder: Path) -> dict[str, Any]:
    """In a process of the pool: trains an arm, and returns its evaluations and what is compared."""
    transformers_logging.disable_progress_bar()
    study, shared, started = STUDIES[arm.study], MODELS[name], time.perf_counter()
    model, tokenizer = base(name, arm.seed, study.warm_up)
    train_set, held_out = data(name, study, arm.seed)
    evaluations = shared.evaluations if study.compares_curves else 1
    spent = Spent(tokens or shared.tokens or study.tokens, evaluations)
    trainer = Measured(
        model=copy.deepcopy(model),
        reward_funcs=reached if study.walks else shared.reward,
        args=make_config(name, arm, len(held_out), folder),
        train_dataset=train_set,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[spent],
        rollout_func=walk if study.walks else with_noise if study.noisy else None,
    )
    trainer.ranges = []
    trainer.train()
    last = spent.curve[-1] | {"range of log-ratios": statistics.fmean(trainer.ranges)}
    return {"arm": arm, "curve": spent.curve, "last": last, "wall": time.perf_counter() - started}


def at_level(curve: Sequence[Mapping[str, float]], level: float) -> float:
    """pass@16 where a curve first has this pass@1, by straight lines between its points."""
    for before, after in pairwise(curve):
        if before["pass@1"] <= level <= after["pass@1"]:
            share = (level - before["pass@1"]) / max(after["pass@1"] - before["pass@1"], 1e-12)
            return before["pass@16"] + share * (after["pass@16"] - before["pass@16"])
    return curve[-1]["pass@16"]


def pairs(name: str, results: Mapping[Arm, dict[str, Any]], seeds: int) -> list[tuple[float, float]]:
    """What is compared of the first and the second arm, seed by seed."""
    study = STUDIES[name]
    found = []
    for seed in range(seeds):
        both = [results[Arm(name, label, seed)] for label in study.arms]
        if study.compares_curves:
            level = min(max(point["pass@1"] for point in result["curve"]) for result in both)
            found.append(tuple(at_level(result["curve"], level) for result in both))
        else:
            found.append(tuple(result["last"][study.measure] for result in both))
    return found


class Verdict(NamedTuple):
    """A claim as it was found: means of the two arms, their paired difference, and p, two-sided."""

    first: float
    second: float
    difference: float
    half: float
    p: float
    word: str
    """`shown`, `not shown`, or `the opposite` where the difference has the other sign, with p < 0.05."""


def judge(name: str, results: Mapping[Arm, dict[str, Any]], seeds: int) -> Verdict:
    """Student's t of the paired differences."""
    found = pairs(name, results, seeds)
    difference, half = interval([first - second for first, second in found])
    t = math.inf if half == 0 else abs(difference) / half * student_quantile(0.025, seeds - 1)
    p = 1.0 if difference == 0 else 2 * student_tail(t, seeds - 1)
    means = (statistics.fmean(column) for column in zip(*found))
    has_its_sign = difference * STUDIES[name].sign > 0
    word = "not shown" if p >= 0.05 else "shown" if has_its_sign else "the opposite"
    return Verdict(*means, difference, half, p, word)


def draw(results: Mapping[Arm, dict[str, Any]], names: Sequence[str], seeds: int, path: Path) -> None:
    """A panel a study: what is compared, a line for each seed, and the means."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 4
    figure = Figure(figsize=(12, 3 * math.ceil(len(names) / columns)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(math.ceil(len(names) / columns), columns, squeeze=False).flatten()
    for panel, name in zip(panels, names):
        found, study = pairs(name, results, seeds), STUDIES[name]
        for pair in found:
            panel.plot([0, 1], pair, color="#2563a8", alpha=0.3, linewidth=1)
        panel.plot([0, 1], [statistics.fmean(column) for column in zip(*found)], color="#2563a8", marker="o")
        panel.set_xticks([0, 1], list(study.arms))
        panel.set_xlim(-0.3, 1.3)
        panel.set_title(f"{study.measure}: {judge(name, results, seeds).word}", loc="left", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    figure.savefig(path)


def render(model: Model, results: Mapping[Arm, dict[str, Any]], names: Sequence[str], seeds: int) -> str:
    """The page."""
    rows = []
    for name in names:
        study, found = STUDIES[name], judge(name, results, seeds)
        first, second = study.arms
        walls = [results[Arm(name, label, seed)]["wall"] for label in study.arms for seed in range(seeds)]
        cells = (
            f"{study.claim} ([{study.paper}](https://arxiv.org/abs/{study.paper}))",
            study.measure,
            f"`{first}` {found.first:.3g}",
            f"`{second}` {found.second:.3g}",
            f"{found.difference:+.2g} ± {found.half:.2g}",
            f"{found.p:.2g}",
            found.word,
            f"{sum(walls) / 60 / JOBS:.0f} min",
        )
        rows.append(f"| {' | '.join(cells)} |")
    shown = sum(judge(name, results, seeds).word == "shown" for name in names)
    each = "" if model.tokens is None else f", {model.tokens:,} an arm"
    return (
        f"# What papers claim, on {model.title}\n\n"
        f"`make {model.page}` trains the two arms of each claim with {seeds} seeds, from the same weights, on the\n"
        f"same prompts, at equal tokens{each}. {model.about}\n\n"
        f"pass@1 and pass@{TRIES} are over {TRIES} answers to each held-out prompt, at temperature 1. A claim is\n"
        "shown if the paired difference over the seeds has its sign, with p < 0.05 (Student's t, two-sided; ± is its\n"
        f"95 % interval). {shown} of {len(names)} are. What is not shown at this size may hold at the paper's, and\n"
        "the other way round.\n\n"
        "| claim | measure | first | second | difference | p | | time |\n|---|---|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n![What is compared, seed by seed](../docs/{model.page}.png)\n"
    )


def main() -> int:
    """Trains the arms that are missing, then draws and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny", help="the tiny model, or SmolLM2-135M-Instruct")
    parser.add_argument("--only", choices=STUDIES, action="append", help="this study alone; repeatable")
    parser.add_argument("--seeds", type=int, help="seeds 0, 1, ..., 2 at least (default 10, or 3 of the real model)")
    parser.add_argument("--tokens", type=int, help="that an arm may spend, in place of each study's own")
    parser.add_argument("--output_dir", type=Path, help="where results.jsonl is written (default runs/PAGE)")
    options = parser.parse_args()
    model = MODELS[options.model]
    if options.model == "real" and (problem := pretrained.missing_because()):
        parser.error(problem)
    names = options.only or [name for name, study in STUDIES.items() if options.model == "tiny" or not study.walks]
    seeds, folder = options.seeds or model.seeds, options.output_dir or Path("runs") / model.page
    folder.mkdir(parents=True, exist_ok=True)
    path, plan = folder / "results.jsonl", {"tokens": options.tokens, "held_out": model.held_out}
    results = finished(path, plan, Arm)
    arms = [Arm(name, label, seed) for name in names for seed in range(seeds) for label in STUDIES[name].arms]
    missing = [arm for arm in arms if arm not in results]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn, log = multiprocessing.get_context("spawn"), folder / "log.txt"
    with ProcessPoolExecutor(JOBS, spawn, start_process, (log,)) as pool:
        futures: list[Any] = [pool.submit(train, options.model, arm, options.tokens, folder) for arm in missing]
        started = time.perf_counter()
        for number, future in enumerate(as_completed(futures), 1):
            result = future.result()
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**result, "plan": plan}) + "\n")
            left = (time.perf_counter() - started) / number * (len(missing) - number) / 60
            study, label, seed = result["arm"]
            found = f"{STUDIES[study].measure.split(' at ')[0]}"
            print(
                f"{number:3} of {len(missing)}, {left:.0f} min left: {study} {label} seed {seed}, "
                f"{found} {result['last'][found]:.3g}",
                flush=True,
            )
    results = finished(path, plan, Arm)
    draw(results, names, seeds, ROOT / "docs" / f"{model.page}.png")
    (ROOT / "recipes" / f"{model.page}.md").write_text(render(model, results, names, seeds), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
