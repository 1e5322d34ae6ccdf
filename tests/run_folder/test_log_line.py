from __future__ import annotations

from groupgrad.run_folder.progress import format_log

TRAIN = {
    "loss": -0.01234,
    "grad_norm": 0.523,
    "learning_rate": 1e-6,
    "reward": 0.5,
    "reward_std": 0.25,
    "completions/mean_length": 45.25,
    "completions/clipped_ratio": 0.125,
    "entropy": 1.2344,
    "step_time": 9.0,
    "epoch": 0.1,
}


def test_a_training_line_shows_the_numbers_that_matter():
    assert format_log(TRAIN, step=5, max_steps=200, seconds_per_step=2.345) == (
        "step   5  reward  0.500 ± 0.250  loss -0.0123  len   45.2  trunc  12%  entropy 1.234  grad  0.52"
        "  lr 1.0e-06    2.35 s/step"
    )


def test_kl_is_shown_when_logged_and_lines_are_aligned():
    lines = [
        format_log({**TRAIN, "kl": 0.01, "reward": reward, "loss": loss}, step=step, max_steps=1000)
        for step, reward, loss in ((1, -2.5, 0.0), (1000, 0.25, -1.25))
    ]
    assert "kl 0.0100" in lines[0]
    assert "  9.00 s/step" in lines[0]  # the event's step_time, without a wall-clock time
    for word in ("loss", "kl", "len", "lr", "s/step"):
        assert lines[0].index(word) == lines[1].index(word)


def test_small_numbers_keep_significant_digits():
    logs = {"reward": 0.5, "reward_std": 0.0042, "loss": -3.2e-5, "kl": 7.1e-6, "entropy": 0.0042, "grad_norm": 0.0042}
    line = format_log(logs, step=1)
    assert line == "step 1  reward  0.500 ± 0.0042  loss -3.2e-05  kl 7.1e-06  entropy 0.0042  grad 0.0042"
    zero = dict.fromkeys(logs, 0.0) | {"loss": 2e-9, "grad_norm": 0.1, "kl": float("inf")}
    assert format_log(zero, step=1).split()[2:] == (
        ["reward", "0.000", "±", "0.000", "loss", "0.0000", "kl", "inf", "entropy", "0.000", "grad", "0.10"]
    )
    assert format_log({"train_runtime": 2.0, "train_loss": 2e-5}, step=3).endswith("mean loss 2e-05")


def test_a_narrow_terminal_drops_the_last_numbers():
    lines = {width: format_log(TRAIN, step=5, max_steps=9, width=width) for width in (200, 100, 20)}
    assert lines[200].endswith("s/step")
    assert 80 < len(lines[100]) < 100 and lines[200].startswith(lines[100])
    assert lines[20].split() == ["step", "5", "reward", "0.500"]


def test_an_evaluation_line_names_its_data_set():
    logs = {
        "eval_math_loss": 0.0,
        "eval_math_policy_loss": 0.1,
        "eval_math_reward": 0.75,
        "eval_math_completions/mean_length": 10.0,
        "eval_math_runtime": 3.21,
        "epoch": 1.0,
    }
    assert format_log(logs, step=20, max_steps=100) == "eval_math  20  reward  0.750  loss  0.0000  len   10.0  3.2 s"
    passes = {
        "eval_runtime": 2.0,
        "eval_policy_loss": 0.5,
        "eval_reward": 1.0,
        "eval_pass@1": 0.25,
        "eval_pass@1_low": 0.2,
        "eval_pass@1/level=2": 0.3,
    }
    text = format_log({**passes, "eval_maj@8": 0.5}, step=1)
    assert text == "eval 1  reward  1.000  pass@1 0.250  maj@8 0.500  2.0 s"


def test_the_end_of_training_is_a_sentence():
    assert format_log({"train_runtime": 75.3, "train_loss": 0.01}, step=40) == (
        "done: 40 steps in 75.3 s, mean loss 0.0100"
    )
    assert format_log({"train_runtime": 9000.0}, step=40) == "done: 40 steps in 2.5 h"
    assert format_log({"train_runtime": 2.25}, step=4) == "done: 4 steps in 2.2 s"


def test_anything_else_is_pairs_and_odd_values_do_not_raise():
    assert format_log({"mine": 0.123456, "epoch": 1.0}, step=3, max_steps=10) == "step  3  mine 0.1235"
    assert "reward    nan" in format_log({"reward": float("nan"), "loss": "n/a"}, step=3)
    assert "reward " not in format_log({"reward": None, "loss": 1.0}, step=3)
