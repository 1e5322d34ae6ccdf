"""Recomputes every logged number from the reward functions' arguments and a row-by-row pass of the policy."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import small_runs
import torch
import torch.nn.functional as F
from noted_calls import note_calls

from groupgrad import dist
from groupgrad.kernels import library
from groupgrad.trainer import trainer as trainer_module


@dataclass
class Seen:
    """Observations of a run: its generation batches and its training passes."""

    batches: list[dict[str, Any]] = field(default_factory=list)
    """One dict a generation batch: lengths, truncated flags, rewards by function, prompt tokens, metric values."""
    passes: list[dict[str, Any]] = field(default_factory=list)
    """One dict a micro-batch: log-probs, old and reference log-probs, entropies, advantage and row of each token."""


@pytest.fixture
def watch(monkeypatch, tokenizer, make_policy):
    """Returns `watch()`, with reward functions `length` (weight 1) and `odd` (weight 0.5, None every third row)."""
    seen, reference = Seen(), make_policy()

    def length(prompts, completion_ids, log_metric, log_extra, **kwargs):
        values = [float(len(ids) % 4) + ids[0] % 2 for ids in completion_ids]
        log_metric("longest", max(map(len, completion_ids)))
        log_metric("longest", 0.0)
        log_extra("first", [ids[0] for ids in completion_ids])
        seen.batches.append(
            {
                "lengths": [len(ids) for ids in completion_ids],
                "ended": [ids[-1] in small_runs.EOS for ids in completion_ids],
                "prompt_tokens": sum(len(tokenizer(p)["input_ids"]) for p in prompts),
                "length": values,
                "longest": [max(map(len, completion_ids)), 0.0],
                "ids": completion_ids,
            }
        )
        return values

    def odd(completion_ids, **kwargs):
        values = [None if i % 3 == 2 else float(ids[-1] % 2) for i, ids in enumerate(completion_ids)]
        seen.batches[-1]["odd"] = values
        return values

    plain = trainer_module.score_tokens

    def note(model, batch, options, *precomputed):
        """Records a pass, recomputed for each row alone."""
        logprobs, entropies, refs = [], [], []
        with torch.no_grad():
            for row in range(batch.num_rows):
                number = int(batch.prompt_of_row[row])
                prompt = batch.prompt_ids[batch.prompt_offsets[number] : batch.prompt_offsets[number + 1]]
                completion = batch.completion_ids[batch.offsets[row] : batch.offsets[row + 1]]
                for network, into in ((model, logprobs), (reference, refs)):
                    logits = network(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
                    all_logprobs = F.log_softmax(logits.double() / options.temperature, dim=-1)
                    into.append(all_logprobs[torch.arange(len(completion)), completion])
                    if network is model:
                        entropies.append(-(all_logprobs.exp() * all_logprobs).sum(-1))
        seen.passes.append(
            {
                "logprobs": torch.cat(logprobs),
                "ref": torch.cat(refs),
                "old": None if batch.old_logprobs is None else batch.old_logprobs.double(),
                "entropy": torch.cat(entropies),
                "row": batch.row_of_token,
                "advantages": batch.advantages.double(),
            }
        )
        return plain(model, batch, options, *precomputed)

    monkeypatch.setattr(trainer_module, "score_tokens", note)
    return lambda: (seen, [length, odd])


def combined(batch: dict[str, Any]) -> list[float]:
    return [a + (0.0 if b is None else 0.5 * b) for a, b in zip(batch["length"], batch["odd"])]


def clipping(passes: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the shares of ratios outside 0.8 to 1.2, and their extremes over completions."""
    low, high, lows, highs = [], [], [], []
    for p in passes:
        ratio = torch.ones_like(p["logprobs"]) if p["old"] is None else (p["logprobs"] - p["old"]).exp()
        advantage = p["advantages"][p["row"]]
        below, above = (ratio < 0.8) & (advantage < 0), (ratio > 1.2) & (advantage > 0)
        low += below.tolist()
        high += above.tolist()
        for row in range(len(p["advantages"])):
            lows.append(float(below[p["row"] == row].double().mean()))
            highs.append(float(above[p["row"] == row].double().mean()))
    region = [a or b for a, b in zip(low, high)]
    return {
        "clip_ratio/low_mean": statistics.mean(low),
        "clip_ratio/high_mean": statistics.mean(high),
        "clip_ratio/region_mean": statistics.mean(region),
        "clip_ratio/low_min": min(lows),
        "clip_ratio/high_max": max(highs),
    }


def expected_of(batches: list[dict[str, Any]], passes: list[dict[str, Any]]) -> dict[str, float]:
    """Computes every number of a log event from its generation batches and training passes."""
    lengths = [n for r in batches for n in r["lengths"]]
    ended = [n for r in batches for n, e in zip(r["lengths"], r["ended"]) if e]
    sums = [combined(r) for r in batches]
    odd = [[v for v in r["odd"] if v is not None] for r in batches]
    groups = [values[i : i + 4] for values in sums for i in range(0, len(values), 4)]
    gaps = torch.cat([p["ref"] - p["logprobs"] for p in passes])
    longest = [value for r in batches for value in r["longest"]]
    return {
        "completions/mean_length": statistics.mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "completions/mean_terminated_length": statistics.mean(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
        "reward": statistics.mean(v for values in sums for v in values),
        "reward_std": statistics.mean(statistics.stdev(values) for values in sums),
        "frac_reward_zero_std": statistics.mean(len(set(group)) == 1 for group in groups),
        "rewards/length/mean": statistics.mean(v for r in batches for v in r["length"]),
        "rewards/length/std": statistics.mean(statistics.stdev(r["length"]) for r in batches),
        "rewards/odd/mean": statistics.mean(v for values in odd for v in values),
        "rewards/odd/std": statistics.mean(statistics.stdev(values) for values in odd),
        "longest": statistics.mean(longest),
        "entropy": float(torch.cat([p["entropy"] for p in passes]).mean()),
        "kl": float((gaps.exp() - gaps - 1).mean()),
        **clipping(passes),
    }


def test_every_number_over_a_window_of_steps(train, watch):
    """Two log events of three steps of two micro-batches; a generation batch feeds two steps, so that the first event
    has two of them."""
    seen, rewards = watch()
    trainer = train(
        reward_funcs=rewards,
        reward_weights=[1.0, 0.5],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_iterations=2,
        temperature=0.9,
        beta=0.05,
        logging_steps=3,
        max_steps=6,
        learning_rate=2e-2,
    )
    logs = trainer.state.log_history
    assert [entry["step"] for entry in logs] == [3, 6, 6]
    assert [len(seen.batches), len(seen.passes)] == [3, 12]
    windows = [(seen.batches[:2], seen.passes[:6]), (seen.batches[2:], seen.passes[6:])]
    tokens = 0
    for entry, (batches, passes) in zip(logs, windows):
        expected = expected_of(batches, passes)
        tokens += sum(sum(r["lengths"]) + r["prompt_tokens"] for r in batches)
        assert {key: entry[key] for key in expected} == pytest.approx(expected, abs=2e-5)
        assert entry["num_tokens"] == tokens
        assert expected["clip_ratio/region_mean"] > 0.05
        # The default engine's log-probs are those of training: measured in the first step of each generation batch.
        assert entry["sampling/logp_mismatch"] < 1e-5
    loop_keys = {"loss", "grad_norm", "learning_rate", "epoch", "step", "step_time", "num_tokens"}
    loop_keys |= {"sampling/logp_mismatch", "sampling/path/direct" if library() is None else "sampling/path/compiled"}
    own = {key for key in logs[0] if not key.startswith("time/")}
    assert own == loop_keys | set(expected_of(*windows[0]))


def test_the_loss_and_the_bonus(train):
    """`loss` = `policy_loss` - coefficient x `entropy`, each a mean over the window's steps.

    Without `log_completions` the trainer neither gathers nor writes completions.
    """
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "generation_batch_size": 16}
    trainer = train(entropy_coef=0.25, **sizes)
    for entry in trainer.state.log_history[:-1]:
        assert entry["entropy_coef"] == 0.25
        assert entry["loss"] == pytest.approx(entry["policy_loss"] - 0.25 * entry["entropy"], abs=1e-5)
    assert stored(trainer) == {}
    assert not any(trainer.completion_log.state_dict()["records"].values())


def test_the_adaptive_coefficient_is_logged_and_moves(train):
    """With entropy above the target there is no bonus, and the coefficient falls by delta a step to its minimum."""
    bounds = {"entropy_target": 0.5, "entropy_coef_delta": 0.04, "entropy_coef_min": 0.05}
    trainer = train(entropy_coef=0.1, use_adaptive_entropy=True, **bounds, max_steps=4)
    entries = trainer.state.log_history[:-1]
    assert [entry["entropy_coef"] for entry in entries] == pytest.approx([0.1, 0.06, 0.05, 0.05])
    assert all("policy_loss" not in entry for entry in entries)
    assert trainer.entropy_controller.coef == 0.05


@pytest.mark.parametrize(
    "settings, present, absent",
    [
        ({"beta": 0.1}, "kl clip_ratio/region_mean", "entropy_coef policy_loss aux_loss cispo_clip_ratio"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo_clip_ratio", "clip_ratio/region_mean"),
        ({"loss_type": "vespo"}, "vespo/phi_seq_mean", "clip_ratio/region_mean"),
        ({"loss_type": "sapo"}, "entropy", "clip_ratio/region_mean cispo_clip_ratio"),
        ({"entropy_coef": 0.1}, "entropy_coef policy_loss", "kl"),
    ],
)
def test_keys_depend_on_the_settings(train, settings, present, absent):
    trainer = train(max_steps=1, **settings)
    entry = trainer.state.log_history[0]
    assert entry.keys() >= set(present.split())
    assert not entry.keys() & set(absent.split())


def test_step_time_is_a_mean_over_steps_and_includes_sampling(make_trainer, monkeypatch):
    trainer = make_trainer(logging_steps=2, max_steps=2, gradient_accumulation_steps=2)
    sample = trainer.engine.sample
    monkeypatch.setattr(trainer.engine, "sample", lambda *given: (time.sleep(0.2), sample(*given))[1])
    trainer.train()
    entry = trainer.state.log_history[0]
    assert 0.2 < entry["step_time"] < 0.2 + trainer.state.log_history[-1]["train_runtime"] / 2


@pytest.mark.slow
def test_collectives_do_not_grow_with_micro_batches(train, monkeypatch):
    """Collectives run per step, per generation batch and per log event, never per micro-batch."""
    names = ("all_gather_objects", "all_gather_rows", "all_sum", "raise_on_all_ranks")
    counts = []
    for rows, accumulation in ((16, 1), (1, 16)):
        with monkeypatch.context() as patch:
            calls = [note_calls(patch, dist, name) for name in names]
            train(
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=accumulation,
                max_steps=2,
                top_entropy_quantile=0.5,
                entropy_coef=0.1,
                use_adaptive_entropy=True,
            )
        counts.append([len(noted) for noted in calls])
    assert counts[0] == counts[1]
    assert 0 < sum(counts[0]) < 31  # in two steps; the last one sums the losses of the run


# ------------------------------------------------------------------------------------------------ completions


def stored(trainer) -> dict[str, list[dict[str, Any]]]:
    folder = Path(trainer.args.output_dir) / "completions"
    return {path.name: pq.read_table(path).to_pylist() for path in sorted(folder.glob("*.parquet"))}


def test_each_log_event_and_phase_has_a_file(train, watch, tools):
    """The fifth step, which fills no window, is logged at the end of training, with its completions."""
    seen, rewards = watch()
    trainer = train(
        reward_funcs=rewards,
        trainer={"eval_dataset": {"dev": tools.prompts(3)}},
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
        logging_steps=2,
        max_steps=5,
        log_completions=True,
        num_completions_to_print=0,
    )
    trainer.evaluate()
    files = stored(trainer)
    trained = {"completions_00002": 16, "completions_00004": 16, "completions_00005": 8}
    evaluated = ("eval_dev_00002", "eval_dev_00004", "eval_dev_00005", "eval_dev_00005_2")
    assert {name.removesuffix(".parquet"): len(rows) for name, rows in files.items()} == {
        **trained,
        **dict.fromkeys(evaluated, 12),
    }
    rows = files["completions_00002.parquet"]
    columns = ["step", "prompt", "completion", "length", "odd", "advantage", "finish_reason", "num_tokens", "first"]
    assert list(rows[0]) == columns
    assert [row["step"] for row in rows] == [0] * 8 + [1] * 8
    batches = [batch for batch in seen.batches if len(batch["ids"]) == 8][:2]
    for name, key in (("num_tokens", "lengths"), ("length", "length"), ("odd", "odd")):
        assert [row[name] for row in rows] == [value for batch in batches for value in batch[key]], name
    assert [row["first"] for row in rows] == [ids[0] for batch in batches for ids in batch["ids"]]
    assert [row["finish_reason"] == "eos" for row in rows] == [end for batch in batches for end in batch["ended"]]
    for start in range(0, 16, 4):
        assert math.fsum(row["advantage"] for row in rows[start : start + 4]) == pytest.approx(0, abs=1e-9)
