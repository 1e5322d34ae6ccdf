"""A model in a GGUF file is dequantized as it is read, and from there on trains, saves and resumes like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupgrad.apps.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture
def make(folder: Path, make_trainer: Any) -> Any:
    def make(**settings: Any) -> Any:
        loading = {"model_init_kwargs": {"gguf_file": tiny_gguf.NAME}, "trainer": {"processing_class": None}}
        return make_trainer(
            model=str(folder),
            reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in "abcd"]}),
            **{"max_completion_length": 4, **loading, **settings},
        )

    return make


def test_it_trains_saves_and_resumes(make: Any, tmp_path: Path) -> None:
    whole = make(max_steps=2, beta=0.1, save_strategy="steps", save_steps=1, output_dir=str(tmp_path / "whole"))
    whole.train()
    resumed = make(max_steps=2, beta=0.1, save_strategy="no", output_dir=str(tmp_path / "whole"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for (name, one), (_, two) in zip(whole.model.named_parameters(), resumed.model.named_parameters()):
        assert torch.equal(one, two), name
    assert any(entry.get("grad_norm", 0) > 0 for entry in whole.state.log_history)

    saved = tmp_path / "whole" / "checkpoint-2"
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(loaded.lm_head.weight, whole.model.lm_head.weight)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template == tiny_gguf.TEMPLATE


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_are_those_of_transformers(make: Any, folder: Path, dtype: str | None) -> None:
    kwargs = {"gguf_file": tiny_gguf.NAME} | ({"dtype": dtype} if dtype else {})
    model = make(model_init_kwargs=kwargs).model
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=tiny_gguf.NAME, dtype=torch.float32)
    assert model.dtype == getattr(torch, dtype or "float32")
    for name, value in read.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.to(model.dtype)), name


def test_an_adapter_trains_over_it(make: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make(trainer={"processing_class": None, "peft_config": lora}, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_commands_accept_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": text, "solution": "4"}) for text in "abcdefgh"))
    run = [
        *("--model_name_or_path", str(folder), "--set", f"model_init_kwargs.gguf_file={tiny_gguf.NAME}"),
        *("--dataset_name", str(rows), "--reward_funcs", "think_format_reward", "--output_dir", str(tmp_path / "run")),
        *("--use_cpu", "--max_completion_length", "4", "--num_generations", "2", "--max_steps", "1"),
        *("--per_device_train_batch_size", "4", "--report_to", "none"),
    ]
    main(["check", *run])  # that four tokens end no answer is an error
    assert "ok       round      4 completions of 2 prompts" in capsys.readouterr().out
    assert main(["train", *run]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").num_parameters() > 0
    capsys.readouterr()
    assert main(["env", "--model", str(folder), "--gguf_file", tiny_gguf.NAME]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    sizes = ["--device", "24GB", "--completion", "16", "--prompt", "8"]
    assert main(["plan", "--model", str(folder), "--gguf-file", tiny_gguf.NAME, *sizes]) == 0
    settings = tmp_path / "run.yaml"
    settings.write_text(f"model_name_or_path: {folder}\nmodel_init_kwargs: {{gguf_file: {tiny_gguf.NAME}}}\n")
    assert main(["plan", "--config", str(settings), *sizes]) == 0
    capsys.readouterr()
    for command in ("env", "plan"):
        assert main([command, "--model", str(folder), *(sizes if command == "plan" else ())]) != 0
        assert f"--gguf-file {tiny_gguf.NAME}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", tiny_gguf.NAME])
def test_a_file_that_is_not_named_is_pointed_out(make_trainer: Any, folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"set model={str(folder)!r} and .*'gguf_file': '{tiny_gguf.NAME}'"):
        make_trainer(model=str(folder / name), trainer={"processing_class": None})


def test_a_missing_package_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupgrad.compat.is_available", lambda name: name != "gguf")
    with pytest.raises(ImportError, match=r"gguf_file='tiny.Q8_0.gguf'.* needs 'gguf'.*pip install 'gguf>=0.10'"):
        make()
