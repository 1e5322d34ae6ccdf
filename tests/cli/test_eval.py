"""`groupgrad eval` evaluates models, checkpoints and runs, and compares two of them prompt by prompt."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.cli.eval import recorded_fields
from groupgrad.apps.cli.main import main
from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.apps.view.evaluations import compared

DIGITS = '''\
def odd(completions, answer, log_extra=None, **kwargs):
    """1 for a completion whose first character has an odd code; it is the answer that votes."""
    log_extra("answer_parsed", [text[:1] or None for text in completions])
    log_extra("length_parsed", [str(len(text)) for text in completions])
    return [float(text[:1] != "" and ord(text[0]) % 2 == 1) for text in completions]
'''


@pytest.fixture
def flags(run_flags: list[str], tmp_path: Path, make_model: Any, make_tokenizer: Any) -> list[str]:
    """Flags of an evaluation in the working folder, where `model` and `other` are two models."""
    make_model(1).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    (tmp_path / "digits.py").write_text(DIGITS)
    sys.modules.pop("digits", None)
    rows = [json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1), "level": a % 2}) for a in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "run.yaml").write_text("max_steps: 2\nnum_generations: 4\nmax_completion_length: 3\nbeta: 0.1\n")
    return ["--config", "run.yaml", "--dataset_name", "rows.jsonl", "--reward_funcs", "digits.odd", "--use-cpu"]


def numbers_of(shown: str, name: str) -> list[str]:
    """The cells of the lines that begin with a name."""
    return [line.split()[1] for line in shown.splitlines() if line.split()[:1] == [name]]


def test_two_models_are_compared_prompt_by_prompt(tmp_path: Path, flags: list[str], capsys: Any) -> None:
    """The means are those of the completions in the file, and comparing with the file is comparing with the model."""
    options = ["--num_generations", "8", "--k", "1,8", "--by", "level"]
    assert main(["eval", "model", *flags, *options, "--against", "other", "--output", "both.json"]) == 0
    shown = capsys.readouterr().out
    content = json.loads(Path("both.json").read_text())
    assert [len(prompt["rewards"]) for prompt in content["prompts"]] == [8] * 6
    for prompt in content["prompts"]:
        right = [text[:1] != "" and ord(text[0]) % 2 == 1 for text in prompt["completions"]]
        assert prompt["rewards"] == [float(one) for one in right]
        assert prompt["numbers"]["pass@1"] == sum(right) / 8 and prompt["numbers"]["pass@8"] == float(any(right))
    mean = sum(prompt["numbers"]["pass@1"] for prompt in content["prompts"]) / 6
    there = content["differences"]["pass@1"]["there"]
    assert content["means"]["pass@1"]["mean"] == content["differences"]["pass@1"]["here"] == pytest.approx(mean)
    assert numbers_of(shown, "pass@1") == [f"{mean:.4g}", f"{there:.4g}", f"{mean:.4g}"]
    assert "model on 6 prompts of rows.jsonl" in shown and "other on 6 prompts" in shown and "maj@8" in shown
    assert set(content["by"]) == {"0", "1"}

    assert main(["eval", "other", *flags, *options, "--output", "other.json"]) == 0
    capsys.readouterr()
    assert main(["eval", "model", *flags, *options, "--against", "other.json", "--output", "again.json"]) == 0
    assert capsys.readouterr().out.splitlines()[-8:] == shown.splitlines()[-8:]
    again = json.loads(Path("again.json").read_text())
    assert (again["prompts"], again["differences"]) == (content["prompts"], content["differences"])
    assert not (tmp_path / "out").exists()


def test_the_model_of_a_run_and_its_checkpoint(flags: list[str], run_flags: list[str], capsys: Any) -> None:
    assert main(["train", *run_flags, "--save_strategy", "steps", "--save_steps", "1", "--learning_rate", "0.1"]) == 0
    for name in ("out", "out/checkpoint-1", "out/checkpoint-2"):
        assert main(["eval", name, *flags, "--limit", "2", "--output", f"{Path(name).name}.json"]) == 0
    found = [json.loads(Path(f"{name}.json").read_text()) for name in ("out", "checkpoint-2", "checkpoint-1")]
    assert found[0]["settings"]["num_generations"] == 4 and len(found[0]["prompts"]) == 2
    completions = [[prompt["completions"] for prompt in one["prompts"]] for one in found]
    assert completions[0] == completions[1] != completions[2]
    capsys.readouterr()
    Path("out/config.json").unlink()
    assert main(["eval", "out", *flags]) == 2
    assert "out has no model, only checkpoints; give one of them, such as out/checkpoint-2" in capsys.readouterr().err


def test_several_sets_are_evaluated_and_compared_by_their_names(flags: list[str], capsys: Any) -> None:
    """Each set has the numbers of an evaluation of it alone."""
    rows = Path("rows.jsonl").read_text().splitlines()
    Path("few.jsonl").write_text("\n".join(rows[:2]))
    sets = ["--dataset", "all=rows.jsonl", "few=few.jsonl"]
    assert main(["eval", "other", *flags, *sets, "--output", "there.json"]) == 0
    assert main(["eval", "model", *flags, *sets, "--by", "level", "--against", "there.json", "--output", "a.json"]) == 0
    shown = capsys.readouterr().out
    assert "model on 6 prompts of all (rows.jsonl)" in shown and "model on 2 prompts of few (few.jsonl)" in shown
    assert "less other, on the same prompts of few (few.jsonl)" in shown
    both = json.loads(Path("a.json").read_text())["sets"]
    assert [len(one["prompts"]) for one in both] == [6, 2] and all("differences" in one for one in both)
    assert main(["eval", "model", *flags, "--dataset", "few.jsonl", "--by", "level", "--output", "b.json"]) == 0
    alone = json.loads(Path("b.json").read_text())
    assert (alone["means"], alone["prompts"]) == (both[1]["means"], both[1]["prompts"])
    capsys.readouterr()
    assert main(["eval", "model", *flags, "--dataset", "few.jsonl", "--against", "there.json"]) == 2
    assert "the evaluation of other has 2 sets, and this one 1" in capsys.readouterr().err


def test_a_run_says_how_to_evaluate_its_model(
    flags: list[str], run_flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    """The data, rewards and sampling are those of its evaluations, from any folder; a flag replaces each of them."""
    rows = Path("rows.jsonl").read_text().splitlines()
    Path("test.jsonl").write_text("\n".join(rows[:3]))
    Path("away").mkdir()
    Path("away/few.jsonl").write_text(rows[0])
    options = ["--eval_strategy", "steps", "--eval_steps", "2", "--per_device_eval_batch_size", "8", "--seed", "7"]
    options += ["--eval_sampling", '{"temperature": 0.5, "num_generations": 8}', "--eval_k", "1", "8"]
    options += ["--dataset_test_name", "held=test.jsonl", "--eval_reward_funcs", "digits.odd", "--save_steps", "1"]
    options += ["--hub_token", "hf_1"]
    assert main(["train", *run_flags, *options]) == 0
    assert "eval_held_pass@8" in Path("out/metrics.jsonl").read_text()
    os.chdir("away")
    assert "hub_token" not in recorded_fields("../out")  # it is not recorded
    for name, given in (("../out", []), ("../out/checkpoint-2", ["--k", "1"])):
        assert main(["eval", name, *given, "--output", "found.json"]) == 0
        content = json.loads(Path("found.json").read_text())
        found = content["settings"]
        assert (found["set"], Path(found["dataset"]).name, len(content["prompts"])) == ("held", "test.jsonl", 3)
        assert (found["num_generations"], found["temperature"], found["seed"]) == (8, 0.5, 7)
        assert (found["max_completion_length"], found["rewards"], found["reward_weights"]) == (3, ["odd"], None)
        assert ("pass@8" in content["means"]) == (not given)
    flags = ["--dataset", "few.jsonl", "--reward_funcs", "counts.count", "digits.odd", "--temperature", "2"]
    assert main(["eval", "../out", *flags, "--num_generations", "3", "--k", "3", "--output", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())["settings"]
    assert (found["dataset"], found["temperature"], found["num_generations"]) == ("few.jsonl", 2.0, 3)
    assert (found["rewards"], found["reward_weights"]) == (["count", "odd"], None)


def test_the_run_of_a_script_has_recorded_no_data(
    flags: list[str], make_model: Any, tokenizer: Any, capsys: Any, recwarn: Any
) -> None:
    settings = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 2, "max_steps": 1}
    settings |= {"log_completions": True, "num_completions_to_print": 0}
    config = GRPOConfig("out", temperature=0.5, eval_k=[2], use_cpu=True, report_to="none", seed=3, **settings)
    rows = Dataset.from_json("rows.jsonl")
    trainer = GRPOTrainer(make_model(), importlib.import_module("digits").odd, config, rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    assert main(["eval", "out"]) == 2
    text = "out is of a run that has not recorded its data, as those of Python scripts; give --dataset"
    assert text in capsys.readouterr().err
    assert main(["eval", "out", "--dataset", "rows.jsonl", "--output", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())["settings"]
    assert (found["rewards"], found["temperature"], found["num_generations"], found["seed"]) == (["odd"], 0.5, 4, 3)
    assert "pass@2" in capsys.readouterr().out
    assert not [str(warning.message) for warning in recwarn if "no effect" in str(warning.message)]
    assert main(["eval", "model"]) == 2
    assert "no data set is given; give --dataset" in capsys.readouterr().err


def test_rewards_of_evaluation_in_the_file_take_the_place_of_those_of_training(flags: list[str], capsys: Any) -> None:
    """Rewards on the command line win over those of the file, by either name; its weights go with its rewards."""
    place = flags.index("--reward_funcs")
    shared = [*flags[:place], *flags[place + 2 :], "--limit", "2", "--output", "found.json"]
    file = Path("run.yaml").read_text() + "reward_funcs: [counts.count, counts.count]\nreward_weights: [2.0, 0.5]\n"
    Path("run.yaml").write_text(f"{file}eval_reward_funcs: digits.odd\non_reward_failure: error\n")
    odd, count = "digits.odd", "counts.count"
    for given, names, weights in (
        ([], ["odd"], None),
        (["--eval-reward-funcs", count], ["count"], None),
        (["--reward_funcs", odd, count], ["odd", "count"], [2.0, 0.5]),
        (["--reward_funcs", odd, count, "--eval_reward_funcs", count, "--reward_weights", "3.0"], ["count"], [3.0]),
    ):
        assert main(["eval", "model", *shared, *given]) == 0
        content = json.loads(Path("found.json").read_text())
        assert (content["settings"]["rewards"], content["settings"]["reward_weights"]) == (names, weights)
        assert f"rewards: {', '.join(names)}\n" in capsys.readouterr().out
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("digits.odd", "digits.even"))
    assert main(["eval", "model", *shared]) == 2
    assert "reward function 'digits.even' cannot be imported" in capsys.readouterr().err


def test_a_run_scores_its_evaluations_by_functions_of_their_own(
    flags: list[str], run_flags: list[str], capsys: Any
) -> None:
    options = ["--eval_strategy", "steps", "--eval_steps", "1", "--dataset_test_name", "rows.jsonl"]
    options += ["--per_device_eval_batch_size", "8", "--eval_reward_funcs", "digits.odd"]
    options += ["--eval_k", "1", "3", "--eval_by", "level"]
    assert main(["train", *run_flags, *options, "--dry-run"]) == 0
    assert re.search(r"^rewards +count\nevaluated by +odd\n", capsys.readouterr().out, re.MULTILINE)
    assert main(["train", *run_flags, *options]) == 0
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "eval_reward" in line]
    assert [line["step"] for line in found] == [1, 2]
    for line in found:
        assert line["eval_rewards/odd/mean"] == line["eval_reward"] == pytest.approx(line["eval_pass@1"])
        assert "eval_rewards/count/mean" not in line
    (shown,) = compared(RunFolder("out"))  # as the page does
    means = {row["name"]: (row["there"]["mean"], row["here"]["mean"]) for row in shown["rows"]}
    assert (shown["there"], shown["here"], shown["prompts"]) == (1, 2, 6)
    assert means["reward"] == pytest.approx(tuple(line["eval_reward"] for line in found))
    assert means["length"] == pytest.approx(tuple(line["eval_completions/mean_length"] for line in found))
    assert means["maj@3"] == pytest.approx(tuple(line["eval_maj@3"] for line in found))
    assert shown["by"]["column"] == "level"
    for part, value in zip(shown["by"]["values"], ("0", "1"), strict=True):
        assert (part["value"], part["prompts"]) == (value, 3)
        assert [row["name"] for row in part["rows"]] == ["reward", "pass@1", "pass@3", "maj@3"]
        for row in part["rows"]:
            logged = [line[f"eval_{row['name']}/level={value}"] for line in found]
            assert [row["there"]["mean"], row["here"]["mean"]] == pytest.approx(logged)
    (interval,) = (row["here"] for row in shown["rows"] if row["name"] == "pass@3")
    assert (interval["low"], interval["high"]) == pytest.approx(
        (found[1]["eval_pass@3_low"], found[1]["eval_pass@3_high"])
    )
    config = json.loads(Path("out/run_config.json").read_text())
    assert (config["reward_functions"], config["eval_reward_functions"]) == (["counts.count"], ["digits.odd"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--by", "subject"], "--by subject: the data set has no such column, only prompt, answer, level"),
        (["--against", "nothing.json"], "nothing.json"),
        (["--against", "./nothing"], "there is no such folder"),
        (["--output", "none/a.json"], "there is no folder none; make it first"),
        (["--use_vllm", "--against", "other"], "evaluate it by itself with --output there.json"),
        (["--dataset", "none.jsonl"], "none.jsonl"),
        (["--dataset", "rows.jsonl", "none.jsonl"], "give each a name of its own, as in math=math.jsonl"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sampled(
    options: list[str], text: str, flags: list[str], capsys: Any
) -> None:
    assert main(["eval", "model", *flags, *options]) == 2
    shown = capsys.readouterr()
    assert text in shown.err and not shown.out


def test_other_prompts_are_refused_before_anything_is_sampled(flags: list[str], capsys: Any) -> None:
    assert main(["eval", "model", *flags, "--limit", "2", "--output", "two.json"]) == 0
    capsys.readouterr()
    assert main(["eval", "model", *flags, "--against", "two.json"]) == 2
    shown = capsys.readouterr()
    assert "the evaluation of model has 2 prompts, this one 6" in shown.err and not shown.out


def test_a_column_of_answers_that_nobody_logs(flags: list[str], capsys: Any) -> None:
    assert main(["eval", "model", *flags, "--answer", "vote"]) == 1
    assert "logged no such column by log_extra, but answer_parsed, length_parsed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--k", "0"], "--k"),
        (["--k", "1,x"], "--k"),
        (
            ["--k", "8"],
            "eval_k has 8, and an evaluation samples 4 completions of a prompt. Set num_generations_eval to 8",
        ),
        (["--temperature", "0"], "temperature=0.0"),
        (["--agianst", "other"], "did you mean --against?"),
    ],
)
def test_a_command_line_that_cannot_work(options: list[str], text: str, flags: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "model", *flags, *options])
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_a_file_for_training_says_how_to_evaluate(flags: list[str], capsys: Any, recwarn: Any) -> None:
    """`eval_sampling` and `eval_k` of the file are in force, a flag wins over each of them, and what trains is left."""
    lines = ["num_generations: 4", "eval_k: [1, 2]", "eval_strategy: steps", "max_completion_length: 3"]
    lines += ["use_peft: true", "lora_r: 4", "beta: 0.1", "sync_ref_model: true", "ref_model_sync_steps: 4"]
    sampling = "eval_sampling: {temperature: 0.5, max_completion_length: 2, num_generations: 6}"
    Path("run.yaml").write_text("\n".join([*lines, sampling]))
    assert main(["eval", "model", *flags, "--limit", "1", "--output", "a.json"]) == 0
    shown = capsys.readouterr().out
    assert "num_generations 6, temperature 0.5" in shown and "max_completion_length 2" in shown and "pass@2" in shown
    assert max(json.loads(Path("a.json").read_text())["prompts"][0]["lengths"]) == 2
    more = ["--num_generations", "3", "--temperature", "2", "--k", "3", "--max_completion_length", "1"]
    assert main(["eval", "model", *flags, "--limit", "1", *more]) == 0
    shown = capsys.readouterr().out
    assert "num_generations 3, temperature 2.0" in shown and "max_completion_length 1" in shown
    assert "pass@3" in shown and "pass@2" not in shown
    assert not [str(warning.message) for warning in recwarn if "no effect" in str(warning.message)]
