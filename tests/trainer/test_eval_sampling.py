"""`eval_sampling` and `eval_k`: an evaluation samples by options of its own, and measures pass@k."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from forked_ranks import on_ranks
from simulated_vllm import simulate_vllm

from groupgrad.batching.eval_loader import EvalBatch
from groupgrad.evaluation.statistics import bootstrap_interval, pass_at_k

CHANGES: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "max_completion_length": 4}


def passes(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """1 or more for an odd last token, None for some."""
    return [None if ids[0] % 11 == 0 else float(ids[-1] % 2) * 1.5 for ids in completion_ids]


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_an_evaluation_is_that_of_a_run_which_trains_with_these_options(make_trainer, tools, engine):
    """Samples, loss, KL and entropy are those at the temperature of the evaluation, whatever the run trains at."""
    settings = {"beta": 0.1, "rollout_engine": engine, "per_device_eval_batch_size": 8}
    expected = make_trainer(**settings, **CHANGES).evaluate(tools.prompts(5))
    changed = make_trainer(**settings, temperature=1.5, eval_sampling=CHANGES).evaluate(tools.prompts(5))
    assert tools.without_times([changed]) == tools.without_times([expected])
    assert changed["eval_completions/max_length"] <= 4 and changed["eval_kl"] == pytest.approx(0.0, abs=1e-6)
    plain = make_trainer(**settings, temperature=1.5).evaluate(tools.prompts(5))
    assert plain["eval_entropy"] != changed["eval_entropy"] and plain["eval_completions/max_length"] > 4


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}])
def test_vllm_evaluates_as_in_a_run_which_trains_with_these_options(make_trainer, tools, monkeypatch, cut):
    """Its log-probs are kept unless a cut makes them of another distribution than the trainer's."""
    simulate_vllm(monkeypatch)
    changes = {"temperature": 0.5, "max_completion_length": 4, **cut}
    settings = {"use_vllm": True, "per_device_eval_batch_size": 8}
    trainer = make_trainer(**settings, eval_sampling=changes)
    changed = trainer.evaluate(tools.prompts(5))
    expected = make_trainer(**settings, **changes).evaluate(tools.prompts(5))
    assert tools.without_times([changed]) == tools.without_times([expected])
    batch = EvalBatch(0, [{"prompt": "ab"}], 1)
    experience, *_ = trainer.components.evaluator(batch, phase="eval", step=0, trainer_state=trainer.state)
    assert (experience.batch.sampling_logprobs is None) == bool(cut)


def test_the_completions_of_a_prompt(make_trainer, tools, recorder):
    trainer = make_trainer(reward_funcs=recorder, eval_sampling={"num_generations": 6}, num_generations_eval=None)
    trainer.evaluate(tools.prompts(2))
    assert recorder.take("row") == [0] * 6 + [1] * 6


def test_pass_at_k_by_hand(make_trainer, tools):
    """Rows without a reward are left out, and a group counts for a k if it has as many others; over uneven batches."""
    seen: list[float | None] = []

    def reward(**kwargs: Any) -> list[float | None]:
        seen.extend(passes(**kwargs))
        return seen[-len(kwargs["completion_ids"]) :]

    settings = {"num_generations_eval": 4, "per_device_eval_batch_size": 8, "eval_k": [1, 2, 4]}
    metrics = make_trainer(reward_funcs=reward, **settings).evaluate(tools.prompts(7))
    groups = [[value for value in seen[start : start + 4] if value is not None] for start in range(0, 28, 4)]
    assert {len(group) for group in groups} >= {3, 4}
    names = [f"eval_pass@{k}" for k in (1, 2, 4)]
    assert {name for name in metrics if "@" in name} == {f"{n}{end}" for n in names for end in ("", "_low", "_high")}
    for k in (1, 2, 4):
        known = [pass_at_k(len(group), sum(value >= 1 for value in group), k) for group in groups if len(group) >= k]
        assert metrics[f"eval_pass@{k}"] == pytest.approx(sum(known) / len(known), rel=1e-12)
        interval = metrics[f"eval_pass@{k}_low"], metrics[f"eval_pass@{k}_high"]
        assert interval == pytest.approx(bootstrap_interval(known), rel=1e-12)
    means = [sum(group) / len(group) for group in groups]
    assert (metrics["eval_reward_low"], metrics["eval_reward_high"]) == pytest.approx(bootstrap_interval(means))


def votes(completion_ids: list[list[int]], log_extra: Any, **kwargs: Any) -> list[float]:
    """The answer is the first token's remainder by 3, of which 0 is right; some have none."""
    log_extra("answer_parsed", [ids[0] % 3 if ids[0] % 5 else None for ids in completion_ids])
    return [float(ids[0] % 5 > 0 and ids[0] % 3 == 0) for ids in completion_ids]


@pytest.mark.parametrize("keeps_all", [True, False])
def test_votes_and_the_values_of_a_column_by_hand(make_trainer, tools, keeps_all):
    """maj@3 is the mean over the 4 subsets of 3 completions, ties by the share of right answers among the winners."""
    rows = tools.prompts(5).add_column("level", [10, 2, 7, 2, 10])
    seen: list[int] = []

    def reward(completion_ids: Any, **kwargs: Any) -> list[float]:
        seen.extend(ids[0] for ids in completion_ids)
        return votes(completion_ids, **kwargs)

    settings = {"num_generations_eval": 4, "per_device_eval_batch_size": 8, "eval_k": [3], "eval_by": "level"}
    trainer = make_trainer(reward_funcs=reward, train_dataset=rows, remove_unused_columns=not keeps_all, **settings)
    metrics = trainer.evaluate(rows)
    voted, right = [], []
    for start in range(0, 20, 4):
        shares = []
        for subset in itertools.combinations(seen[start : start + 4], 3):
            counts = Counter(token % 3 for token in subset if token % 5)
            winners = [answer for answer, count in counts.items() if count == max(counts.values())]
            shares.append(winners.count(0) / len(winners) if winners else 0.0)
        voted.append(sum(shares) / 4)
        right.append(sum(token % 5 > 0 and token % 3 == 0 for token in seen[start : start + 4]) / 4)
    assert 0 < sum(voted) < 5 and metrics["eval_maj@3"] == pytest.approx(sum(voted) / 5, rel=1e-12)
    assert metrics["eval_maj@3_low"] < metrics["eval_maj@3"] < metrics["eval_maj@3_high"]
    for name, values in (("reward", right), ("maj@3", voted)):
        expected = {2: (values[1] + values[3]) / 2, 7: values[2], 10: (values[0] + values[4]) / 2}
        found = {key: value for key, value in metrics.items() if key.startswith(f"eval_{name}/")}
        assert list(found) == [f"eval_{name}/level={level}" for level in expected]
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-12)


def test_a_set_without_the_column_of_eval_by(make_trainer, tools):
    text = "eval_by='level' splits evaluations by a column, and {} has no such column .it has prompt"
    sets = {"easy": tools.prompts(2).add_column("level", [1, 2]), "hard": tools.prompts(2)}
    with pytest.raises(ValueError, match=text.format(r"eval_dataset\['hard'\]")):
        make_trainer(trainer={"eval_dataset": sets}, eval_by="level")
    with pytest.raises(ValueError, match=text.format("eval_dataset")):
        make_trainer(eval_by="level").evaluate(tools.prompts(2))


def test_ranks_that_share_a_group_find_the_same(ranks, tmp_path, tools):
    """Two ranks of two rows each share the groups of four, as where a group is larger than a rank's batch."""

    def evaluate(folder: Any, rows: int) -> dict[str, float]:
        settings = {"eval_k": [1, 3], "per_device_eval_batch_size": rows, "num_generations_eval": 4}
        metrics = ranks.build("passes", folder, reward=passes, **settings).evaluate(tools.prompts(3))
        return {name: value for name, value in metrics.items() if "pass@" in name}

    both = on_ranks(lambda rank: evaluate(tmp_path / "two", 2), tmp_path, 2, connect=False)
    alone = evaluate(tmp_path / "one", 4)
    assert len(alone) == 6 and 0 < alone["eval_pass@1"] < 1
    assert both[0] == both[1] == pytest.approx(alone, rel=1e-12)


def test_a_rollout_function_samples_by_itself(make_trainer):
    def sample(prompts: Any, trainer: Any) -> dict[str, Any]:
        return trainer.sample_completions(prompts)

    with pytest.raises(ValueError, match="with a rollout_func, which samples by itself; leave all but num_generations"):
        make_trainer(trainer={"rollout_func": sample}, eval_sampling={"temperature": 0.5})
    make_trainer(trainer={"rollout_func": sample}, eval_sampling={"num_generations": 2})
