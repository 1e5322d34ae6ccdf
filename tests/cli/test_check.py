"""`groupgrad check` says what is right and wrong about a run, and leaves nothing behind."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groupgrad import dist
from groupgrad.apps.check.round_findings import before_training, round_findings
from groupgrad.apps.check.small_round import Round, Usage, fullest
from groupgrad.apps.cli import check
from groupgrad.apps.cli.check import as_text, in_numbers
from groupgrad.apps.cli.main import main
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.run_folder.advice import Finding
from groupgrad.scoring.rounding import Rounding

PLAN = GenerationPlan(
    micro_batch_rows=8, world_size=1, accumulation=4, steps_per_generation=4, num_iterations=1, num_generations=4
)
GIB = 2**30
METRICS = {
    "loss": 0.0,
    "reward": 0.5,
    "reward_std": 0.2,
    "rewards/one/mean": 0.5,
    "completions/clipped_ratio": 0.0,
    "completions/min_length": 3.0,
    "completions/max_length": 9.0,
    "frac_reward_zero_std": 0.0,
    "step_time": 2.0,
    "time/sampling": 1.5,
    "time/rewards": 0.1,
    "sampling/logp_mismatch": 1e-6,
}


def topics(shown: str) -> dict[str, str]:
    """The status of each topic that was printed."""
    found = (re.match(r"(ok|warning|error) +(\w+) ", line) for line in shown.splitlines())
    return {match[2]: match[1] for match in found if match}


def judged(ranks: int = 1, **metrics: Any) -> dict[str, Finding]:
    """The findings about a round with these metrics, by topic."""
    memory, num_places = fullest([Usage("host", False, 12 * GIB, 10 * GIB, 100 * GIB)] * ranks)
    numbers = {key: value for key, value in {**METRICS, **metrics}.items() if value is not None}
    done = Round(numbers, rows=8, micro_batch_rows=8, sample="", memory=memory, num_places=num_places)
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            max_completion_length=256, mask_truncated_completions=False, use_vllm=False, temperature=1.0
        ),
        rewards=SimpleNamespace(names=["one"]),
        model=torch.nn.Linear(1, 1),
        accelerator=SimpleNamespace(mixed_precision="no", device="cpu"),
        rounding=Rounding(2**-23),
    )
    return {finding.topic: finding for finding in round_findings(trainer, done, PLAN, num_steps=1800)}


@pytest.fixture
def checked(run_flags: list[str], tmp_path: Path, capsys: Any, monkeypatch: Any) -> Callable[..., Any]:
    """`checked(*flags, reward=RETURNED)`: the exit code, the words and the topics of a check, perhaps of a reward."""

    def run(*flags: str, reward: str = "") -> tuple[int, str, dict[str, str]]:
        if reward:
            (tmp_path / "own_reward.py").write_text(f"def own(completions, answer, **kwargs):\n    {reward}\n")
            monkeypatch.delitem(sys.modules, "own_reward", raising=False)
            flags = (*flags, "--reward_funcs", "own_reward.own")
        code = main(["check", *run_flags, *flags])
        text = capsys.readouterr().out
        return code, " ".join(text.split()), topics(text)

    return run


@pytest.mark.parametrize(
    ("group_rewards", "text"),
    [
        # Student's interval of 0.2, 0.4, 0.6: mean 0.4, standard error 0.2 / sqrt(3), 4.3027 of them.
        ([0.2, 0.4, 0.6], "the model before training scores -0.0968 to 0.897 (95 % interval, 3 prompts)"),
        ([0.0, 1.0] * 50, "the model before training scores 0.4 to 0.6 (95 % interval, 100 prompts)"),
        # 0.05 ** (1 / 4) is 0.47.
        ([0.0] * 4, "each of 4 prompts has this mean; before training less than 53 % of prompts have another"),
        ([0.5], "a single prompt does not show what the model scores before training: raise generation_batch_size"),
    ],
)
def test_what_the_model_scores_before_training(group_rewards: list[float], text: str) -> None:
    assert before_training(group_rewards).startswith(text)


def test_the_interval_covers_the_true_score_in_95_of_100_rounds() -> None:
    generator = torch.Generator().manual_seed(0)
    for number in (2, 4, 9, 30):
        rounds = torch.randn(2000, number, generator=generator, dtype=torch.float64).tolist()
        ends = [re.findall(r"scores (\S+) to (\S+) \(", before_training(rewards))[0] for rewards in rounds]
        covered = sum(float(low) <= 0 <= float(high) for low, high in ends) / len(ends)
        assert covered == pytest.approx(0.95, abs=0.015), number


def test_the_groups_of_a_round_are_those_of_its_prompts(checked: Any) -> None:
    """Each completion gets a number of its prompt, so two groups that differ by d have an interval of 12.706 d."""
    _, shown, _ = checked("--reward_weights", "1.0", reward="return [float(text) for text in answer]")
    found = re.search(r"the model before training scores (\S+) to (\S+) \(95 % interval, 2 prompts\)", shown)
    assert found is not None, shown
    difference = (float(found[2]) - float(found[1])) / 12.706
    assert round(difference) >= 1 and difference == pytest.approx(round(difference), rel=0.01)


@pytest.mark.parametrize(
    ("flags", "completions"),
    [
        # 2 steps of a run, 8 prompts, 4 completions each.
        (["--eval_strategy", "steps", "--eval_steps", "1"], 64),
        (["--eval_strategy", "steps", "--eval_steps", "0.6", "--num_generations_eval", "2", "--eval_on_start"], 32),
        (["--eval_strategy", "epoch"], 32),
        ([], 0),
    ],
)
def test_the_time_of_evaluations_is_told(flags: list[str], completions: int, checked: Any) -> None:
    _, shown, _ = checked("--dataset_test_name", "rows.jsonl", *flags)
    found = re.search(r"and 2 steps [\d.]+ \w+(?:; (\d+) completions in evaluations take [\d.]+ \w+ more)? ok", shown)
    assert found is not None, shown
    assert int(found[1] or 0) == completions


@pytest.mark.parametrize(
    ("flags", "offer"),
    [
        ([], r"ok +baseline +`(groupgrad eval \S*/model .*)` evaluates the model before training, on rows\.jsonl"),
        (["--eval_strategy", "epoch"], "ok +baseline +eval_on_start=True also evaluates before the first step"),
        (["--eval_strategy", "epoch", "--eval_on_start"], None),
    ],
)
def test_an_evaluation_before_the_first_step_is_offered(
    flags: list[str], offer: str | None, checked: Any, capsys: Any
) -> None:
    """The command that is offered can be run."""
    _, shown, _ = checked("--dataset_test_name", "rows.jsonl", "--no-round", *flags)
    found = re.search(offer or "baseline", shown)
    assert (found is None) == (offer is None)
    if found is not None and found.groups():
        assert main(shlex.split(found[1])[1:]) == 0
        assert "on 8 prompts of rows.jsonl" in capsys.readouterr().out


def test_a_run_that_truncates_all_completions_is_an_error(tmp_path: Path, checked: Any) -> None:
    """The round makes no file in the run's folder, and it uses the run's own limits."""
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    code, shown, found = checked("--max_completion_length", "1", "--prompts", "1")
    assert (code, found["ended"]) == (1, "error") and "all completions were truncated" in shown
    assert "max_completion_length is 1." in shown and "1 error," in shown
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


def test_a_run_that_can_begin(checked: Any) -> None:
    """The figures are those of the run, with 2 prompts of 4 completions sampled; the log of the round is not shown."""
    flags = ["--max_completion_length", "256", "--gradient_accumulation_steps", "2", "--prompts", "2"]
    code, shown, found = checked(*flags)
    assert code == 0 and set(found) >= {
        "settings",
        "columns",
        "prompts",
        "template",
        "batch",
        "steps",
        "round",
        "agreement",
        "memory",
    }
    assert found["agreement"] == found["columns"] == found["variance"] == "ok"
    assert "an optimizer step trains 16 completions" in shown and "8 completions of 2 prompts were sampled" in shown
    assert "4 tokens" in shown and "prompts are made of prompt; reward functions name answer" in shown
    assert "is answered by" in shown and "done:" not in shown and "step 1" not in shown


def test_a_reward_function_that_fails_is_an_error(checked: Any) -> None:
    code, shown, _ = checked(reward="raise OSError('no judge')")
    assert code == 1 and re.search(r"error round it failed with \w+: .*'own'", shown)


def test_without_a_round_nothing_is_sampled(checked: Any) -> None:
    """Remarks about the settings are findings; a prompt without room for a completion is one too."""
    flags = ["--no-round", "--max_completion_length", "510", "--sapo_temperature_pos", "2.0"]
    code, shown, found = checked(*flags, reward="raise OSError('no judge')")
    assert code == 0 and found["settings"] == found["prompts"] == "warning" and "round" not in found
    assert "100 % of them leave no room for a completion of 510 tokens (max_completion_length)" in shown
    assert "in the context of 512 positions" in shown and "lower max_completion_length, or" in shown


def test_a_completion_length_beyond_the_context_is_told_with_both_numbers(checked: Any) -> None:
    code, text, _ = checked("--max_completion_length", "4000", "--prompts", "1")
    assert code in (0, 1)
    assert "a completion of 4,000 tokens (max_completion_length) in the context of 512 positions" in text
    assert "Lower max_completion_length below 512, or raise" in text


def test_of_several_processes_the_main_one_prints(run_flags: list[str], capsys: Any, monkeypatch: Any) -> None:
    """All of them return the worst code."""
    codes: list[int] = []

    def gather(found: Any) -> list[Any]:
        codes.append(found)
        return [found, 1]

    build = check._build

    def built(*arguments: Any) -> Any:
        trainer = build(*arguments)
        monkeypatch.setattr(dist, "is_main", lambda: False)
        monkeypatch.setattr(dist, "all_gather_objects", gather)
        return trainer

    monkeypatch.setattr(check, "_build", built)
    assert main(["check", *run_flags, "--no-round"]) == 1
    assert codes == [0] and capsys.readouterr().out == ""


def test_what_cannot_begin_ends_with_a_sentence(run_flags: list[str], capsys: Any) -> None:
    assert main(["check", *run_flags, "--prompt_column", "nowhere"]) == 2
    assert "groupgrad check: error: the data set has no column 'nowhere'" in capsys.readouterr().err
    for flags, text in (["--promts", "3"], "did you mean --prompts?"), (["--prompts", "0"], "give at least 1"):
        with pytest.raises(SystemExit) as ended:
            raise SystemExit(main(["check", *run_flags, *flags]))
        assert ended.value.code == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("eos", ["<eos>", "<bos>"])
def test_conversations_whose_turns_end_with_another_token(
    eos: str, tmp_path: Path, checked: Any, make_tokenizer: Any
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = eos
    turn = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<bos>\n{% endfor %}"
    tokenizer.chat_template = turn + "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    code, shown, found = checked("--conversational", "true", "--no-round")
    assert code == 0 and f"prompts go through the chat template; completions end with '{eos}'" in shown
    assert found["template"] == ("warning" if eos == "<eos>" else "ok")
    assert ("ends turns with '<bos>'" in shown) == (eos == "<eos>")


@pytest.mark.parametrize(
    ("metrics", "topic", "status", "text"),
    [
        ({}, "ended", "ok", "100 % of completions ended by themselves; they are 3 to 9 tokens long"),
        ({"completions/clipped_ratio": 0.5}, "ended", "warning", "max_completion_length is 256. Raise"),
        ({"frac_reward_zero_std": 0.75}, "variance", "warning", "75 % of groups have no variance"),
        ({"frac_reward_zero_std": 1.0}, "variance", "warning", "stop_without_signal=10 ends a run that stays so"),
        ({"rewards/one/mean": float("nan"), "reward": None}, "rewards", "error", "one gave no number"),
        ({"reward_std": None}, "rewards", "ok", "mean 0.5, of a single completion"),
        ({"time/rewards": 1.5}, "scoring", "warning", "took 1.5 s, 75 % of the round. Make slow"),
        ({"sampling/logp_mismatch": 0.3}, "agreement", "warning", "differ by 0.3 nats"),
        ({"tools/failure_frequency": 0.5}, "advice", "warning", "50 % of tool calls fail"),
        ({}, "time", "ok", "a step of 32 completions takes about 8 s at this rate, and 1,800 steps 4 h"),
        (
            {"sampling/logp_mismatch": None, "sampling/sampling_logp_difference/mean": 0.01},
            *("agreement", "ok", "sampler and trainer differ by 0.01 nats a token on average"),
        ),
        ({"sampling/logp_mismatch": None}, "agreement", "warning", "were not compared: no token"),
        ({}, "memory", "ok", "1 process with libraries and model took at most 12 GiB of the 100 of the machine, 2 GiB"),
        ({"ranks": 8}, "memory", "warning", "8 processes with libraries and model took at most 96 GiB of the 100 of"),
    ],
)
def test_numbers_of_a_round(metrics: dict[str, Any], topic: str, status: str, text: str) -> None:
    finding = judged(**metrics)[topic]
    assert finding.status == status
    shown = f"{finding.text} {finding.setting}"
    assert text in shown
    assert shown.count("%") <= 1  # no share and its complement, and none twice


def test_of_several_accelerators_the_fullest_counts() -> None:
    """Ranks that share one are added: here the two of host b on g0."""
    peaks = {("a g0", 40): 1, ("b g0", 21): 2, ("b g1", 30): 1}
    usages = [Usage(at, True, peak, 10, 80) for (at, peak), number in peaks.items() for _ in range(number)]
    assert fullest(usages) == (Usage("b g0", True, 42, 20, 80, num_ranks=2), 3)


def test_agreement_is_measured_where_no_row_has_a_gradient(checked: Any) -> None:
    """Training makes no pass for rows of equal rewards, so the round makes one."""
    code, shown, found = checked("--max_completion_length", "256", reward="return [1.0] * len(completions)")
    assert (code, found["variance"]) == (0, "warning")
    assert re.search(r"ok agreement log-probs of sampler and trainer differ by [\de.-]+ nats at most", shown)


def test_findings_are_printed_in_columns() -> None:
    found = [Finding("data", "few " * 30, "warning", "Add rows."), Finding("x", "fine")]
    lines = as_text(found, width=60).splitlines()
    assert lines[0].startswith("warning  data       few") and lines[1].startswith(" " * 20 + "few")
    assert lines[-1] == "ok       x          fine" and in_numbers(found) == "0 errors, 1 warning"
    assert all(len(line) <= 60 for line in lines)
