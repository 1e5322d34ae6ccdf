"""The `groupgrad` command: flags and a file take effect, a dry run describes, a shell completes, exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_loss
import pytest
from small_runs import relative, weights
from synthetic_run import write_run
from transformers import AutoModelForCausalLM

from groupgrad.activity import EXIT_HUNG
from groupgrad.apps.cli.command_parser import COMMAND_CODES, EXIT_CODES
from groupgrad.apps.cli.main import COMMANDS, main
from groupgrad.apps.sweep.store import Store
from groupgrad.errors import EXIT_CHECKPOINT_NOT_SAVED
from groupgrad.stopping import EXIT_INTERRUPTED, EXIT_STOPPED


def test_flags_and_a_file_take_effect(tmp_path: Path, run_flags: list[str], capsys: Any) -> None:
    """The run's log shows each setting that was given; a flag wins over the file."""
    flags = [
        *run_flags,
        *("--learning-rate", "3e-3", "--lr_scheduler_type=constant", "--beta=0.1", "--logging-steps", "1"),
        *("--save_strategy", "steps", "--save_steps", "2", "--no_shuffle_dataset", "--log-completions"),
        *("--num_completions_to_print", "1"),
    ]
    assert main(["train", *flags]) == 0
    entries = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in entries] == [1, 2]
    for entry in entries:
        assert entry["learning_rate"] == 3e-3
        assert entry["completions/max_length"] <= 3
        assert entry["reward"] == pytest.approx(0.5 * entry.get("rewards/count/mean", float("nan")))
        assert "kl" in entry
    assert entries[1]["epoch"] == 0.5  # two groups of four a step, of eight prompts
    shown = capsys.readouterr().out
    assert shown.count("0+1=") + shown.count("1+1=") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_loss_of_ones_own_trains_by_a_file(tmp_path: Path, run_flags: list[str]) -> None:
    """With SGD twice the factor is twice the learning rate. The flag wins over the file."""
    (tmp_path / "losses_of_a_file").mkdir()
    shutil.copy(own_loss.__file__, tmp_path / "losses_of_a_file" / "scaled.py")
    with (tmp_path / "run.yaml").open("a") as file:
        file.write("loss_type: losses_of_a_file.scaled\nloss_settings: {factor: 2.0}\noptim: sgd\nmax_grad_norm: 0\n")
    sgd = [*run_flags, "--lr_scheduler_type", "constant", "--learning_rate"]
    assert main(["train", *sgd, "0.1"]) == 0
    assert main(["train", *sgd, "0.2", "--loss_settings", '{"factor": 1.0}', "--output-dir", "faster"]) == 0
    first, found, expected = (
        weights(AutoModelForCausalLM.from_pretrained(tmp_path / name)) for name in ("model", "out", "faster")
    )
    assert relative(found, expected) < 1e-5 and relative(found, first) > 1e-3


AS_A_COMMAND = """
import runpy, sys
from groupgrad.apps.cli.main import module_of
module_of("train")
sys.stderr.write("IMPORTED")
try:
    runpy.run_module("groupgrad", run_name="__main__", alter_sys=True)
finally:
    assert "torch._inductor.compile_fx" not in sys.modules
"""
"""`python -m groupgrad`, and a word between what libraries print on stderr when they are imported, as bitsandbytes does
on some CPUs, and what follows. Torch's compiler, which takes seconds to import, is left to runs that need it."""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["completion", "bash"], ["train", "--help"]])
def test_output_that_is_read_in_part_ends_without_a_traceback(flags: list[str]) -> None:
    command = [sys.executable, "-c", AS_A_COMMAND, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as `head` does once it has its lines
        _, word, errors = process.stderr.read().partition(b"IMPORTED")
        assert (word, errors, process.wait(60)) == (b"IMPORTED", b"", 0)


def test_a_dry_run_describes_the_run_and_leaves_nothing(tmp_path: Path, run_flags: list[str], capsys: Any) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    settings = ["--set", "generation_kwargs.top_k=3", "--gradient_accumulation_steps", "2", "--beta=0.0"]
    assert main(["train", *run_flags, *settings, "--no_shuffle_dataset", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    given, derived, _ = shown.split("\n\n", 2)
    assert given.startswith("settings that were given:\n") and derived.startswith("settings that follow from them")
    named = [re.findall(r"^  (\w+): ", part, re.MULTILINE) for part in (given, derived)]
    assert set(named[0]) == {
        *("dataset_name", "reward_funcs", "model_name_or_path", "output_dir", "report_to", "use_cpu", "max_steps"),
        *("num_generations", "per_device_train_batch_size", "max_completion_length", "reward_weights", "logging_steps"),
        *(
            "generation_kwargs",
            "gradient_accumulation_steps",
            "shuffle_dataset",
            "beta",
        ),  # beta has its default's value
    }
    assert "dataloader_pin_memory" in named[1] and not {"debug", "accelerator_config"} & set(named[1])
    assert "generation_kwargs: {'top_k': 3}" in given and "reward_funcs: ['counts.count']" in given
    assert "an optimizer step trains 16 completions (8 a micro-batch x 2 micro-batches x 1 process)" in shown
    assert "16 are sampled at a time, 4 for each of 4 prompts, and trained on once" in shown
    assert "2, which use 8 prompts (1 epochs)" in shown and "8 prompts to train on" in shown
    assert "native engine" in shown and "shared layout" in shown and "No step was taken." in shown
    assert sorted(path.name for path in tmp_path.iterdir() if path.name not in ("cache", "__pycache__")) == before


def test_a_shell_completes_commands_and_flags(tmp_path: Path, capsys: Any) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)
    script = (
        "source completion.bash\n"
        "COMP_WORDS=(groupgrad train --num_gen) COMP_CWORD=2\n_shtab_groupgrad groupgrad --num_gen train\n"
        'echo "${COMPREPLY[@]}"\n'
        "COMP_WORDS=(groupgrad vl) COMP_CWORD=1\n_shtab_groupgrad groupgrad vl groupgrad\n"
        'echo "${COMPREPLY[@]}"\n'
        "complete -p groupgrad\n"
    )
    done = subprocess.run(["bash", "-c", script], check=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    *words, registered = done.stdout.splitlines()
    assert words == ["--num_generations --num_generations_eval", "vllm-serve"]
    assert "-o default" in registered  # names of files where no flag fits


def test_the_exit_codes_of_the_help_are_those_of_the_package(capsys: Any) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert {0, 1, 2, EXIT_HUNG, EXIT_CHECKPOINT_NOT_SAVED, EXIT_STOPPED, EXIT_INTERRUPTED} == EXIT_CODES.keys()
    assert all(f"\n  {code} " in shown for code in EXIT_CODES)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_its_exit_codes(command: str, capsys: Any) -> None:
    """argparse ends with SystemExit where the command does not return."""
    try:
        assert main([command, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {code:<5}{meaning}" in shown for code, meaning in COMMAND_CODES[command].items())
    assert COMMAND_CODES[command].keys() <= EXIT_CODES.keys()


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["viwe"], "did you mean 'view'?"),
        (["rollouts", ".", "--min-rewrd=1"], "unknown option '--min-rewrd'; did you mean --min-reward?"),
        (["env", "extra"], "unrecognized arguments: extra"),
        (["rollouts", ".", "--search", "--a b", "--min-reward", "x"], "invalid float value: 'x'"),
        (["replay", "--stp=3"], "unknown option '--stp'; did you mean --step?"),
        (["replay", "."], "the following arguments are required: --step"),
        (["replay", ".", "--step", "1", "--rewards", "recordet"], "call, recorded; did you mean 'recorded'?"),
        (["completion", "bsh"], "did you mean 'bash'?"),
        (["train", "--save_strategy", "stesp"], "did you mean 'steps'?"),
    ],
)
def test_an_unknown_word_ends_with_what_was_meant(argv: list[str], hint: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(argv))
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_options_may_be_written_with_underscores(tmp_path: Path, capsys: Any) -> None:
    assert main(["rollouts", str(tmp_path), "--min_reward=0.5"]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_looking_at_runs_loads_no_torch(tmp_path: Path) -> None:
    """The tables of runs and sweeps come without the seconds that torch and transformers take to load."""
    write_run(tmp_path / "run", steps=2, rows=4)
    store = Store(tmp_path / "sweep", create=True)
    store.set_fact("metric", "reward")
    store.add_arms([("01-a", 0, {"beta": 0.1}), ("02-b", 0, {"beta": 0.2})])
    commands = [["rollouts", str(tmp_path / "run")], ["sweep", "status", str(tmp_path / "sweep")]]
    commands += [["view", str(tmp_path / "run"), "--export", str(tmp_path / "page.html")]]
    commands += [["view", "--help"], ["--help"]]
    code = f"""
import os, sys
from groupgrad.apps.cli.main import main
for command in {commands!r}:
    try:
        status = main(command)
    except SystemExit as end:
        status = end.code
    loaded = sorted({{"torch", "transformers"}} & set(sys.modules))
    assert not status and not loaded, (command, status, loaded)
# What starts processes does not import the trainer: its seconds would come before those in which each process does.
os.execv = lambda *_: sys.exit("transformers" in sys.modules)
main(["train", "--num-processes", "2"])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "01-a" in ended.stdout
