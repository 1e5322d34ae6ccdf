"""The command line with images: the flags of the documents' example, with whole and with quantized weights."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import tiny_vlms
from datasets import Dataset

from groupgrad.apps.cli import train as train_command
from groupgrad.apps.cli.parsing import parse

pytest.importorskip("peft")

REWARD = "def words(completions, **kwargs):\n    return [float(len(c[0]['content'])) for c in completions]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A VLM, its processor, rows with images and a reward function, all on disk."""
    built = tiny_vlms.build("gemma3")
    built.model.save_pretrained(tmp_path / "model")
    built.processor.save_pretrained(tmp_path / "model")
    rows = [
        {"prompt": [{"role": "user", "content": "which?"}], "image": tiny_vlms.make_image(color)}
        for color in ("red", "blue", "green", "white")
    ]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))
    (tmp_path / "mine.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def command(folder: Path, *flags: str) -> list[str]:
    """The example's flags with a small model and data set."""
    return [
        *("--model_name_or_path", str(folder / "model")),
        *("--dataset_name", str(folder / "rows")),
        *("--output_dir", str(folder / "out")),
        *("--reward_funcs", "mine.words"),
        *("--learning_rate", "1e-5"),
        *("--max_completion_length", "4"),
        "--use_peft",
        *("--lora_target_modules", "q_proj,", "v_proj"),
        "--log_completions",
        *("--num_completions_to_print", "0"),
        *("--use_cpu", "--max_steps", "1", "--report_to", "none", "--save_strategy", "no"),
        *("--per_device_train_batch_size", "4", "--num_generations", "4", "--bf16", "false"),
        *flags,
    ]


@pytest.mark.parametrize("flags", [("--dtype", "bfloat16"), ("--load_in_4bit",)], ids=["bfloat16", "4 bits"])
def test_flags_of_the_image_example(flags: tuple[str, ...], folder: Path):
    if "--load_in_4bit" in flags:
        pytest.importorskip("bitsandbytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = parse(command(folder, *flags))
        trainer = train_command.build(parsed)
        train_command.run(trainer, parsed)
    (entry,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert 0 < entry["completions/mean_length"] <= 4
    assert trainer.prompt_maker(trainer.train_dataset[0], 0).media is not None
    types = {type(module).__name__ for module in trainer.model.modules()}
    assert ("Linear4bit" in types) == ("--load_in_4bit" in flags)
    adapted = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert adapted
    assert all(".q_proj." in name or ".v_proj." in name for name in adapted)
    assert (folder / "out" / "adapter_model.safetensors").exists()
    assert len(list((folder / "out" / "completions").glob("*.parquet"))) == 1
