"""The training script that ships in TRL's wheel runs here with nothing but the package's name replaced."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pickle
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_runs import SETTINGS
from transformers import HfArgumentParser

import groupgrad
import groupgrad.trainer
from groupgrad import (
    DatasetMixtureConfig,
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from groupgrad.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The peer's script after `sed s/trl/groupgrad/` on its imports."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None, "the dev extra installs trl, whose script this test reads"
    source = (Path(spec.origin).parent / "scripts" / "grpo.py").read_text()
    path = tmp_path / "grpo.py"
    path.write_text(re.sub(r"\bfrom trl\b", "from groupgrad", source))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    lines = [json.dumps({"prompt": f"{a}+1=", "solution": str(a + 1)}) for a in range(8)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def settings(
    tmp_path: Path, rows: Path, make_model: Any, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Flags of a short run of a small model, saved in a folder; all folders are relative."""
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return {
        **SETTINGS,
        "model_name_or_path": "model",
        "dtype": "bfloat16",
        "dataset_name": rows.name,
        "reward_funcs": ["think_format_reward", "get_soft_overlong_punishment"],
        "output_dir": "out",
        "save_strategy": "steps",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
    }


@pytest.fixture
def run(script: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the script with these arguments; its namespace."""

    def run(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        return runpy.run_path(str(script), run_name="__main__")

    return run


def flags(settings: dict[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        words += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    return words


def test_the_script_with_flags(run: Run, settings: dict[str, Any], tmp_path: Path) -> None:
    run(*flags(settings))
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["global_step"] == 1
    assert state["log_history"][0]["rewards/soft_overlong_punishment_reward/mean"] == 0.0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


EXAMPLE = """
import torch
from datasets import load_dataset
from groupgrad import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from groupgrad.rewards import think_format_reward

parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
training_args.model_init_kwargs = dict(revision=model_args.model_revision, dtype=dtype)
training_args.scale_rewards = False
trainer = GRPOTrainer(
    model=model_args.model_name_or_path,
    args=training_args,
    reward_funcs=[think_format_reward],
    train_dataset=load_dataset(script_args.dataset_name)[script_args.dataset_train_split],
    peft_config=get_peft_config(model_args),
)
trainer.train()
trainer.save_model(training_args.output_dir)
"""


def test_a_script_that_completes_its_arguments_after_parsing(
    run: Run, script: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    """As the peer's example scripts do, with the dtype itself in place of its name."""
    del settings["reward_funcs"]
    script.write_text(EXAMPLE)
    namespace = run(*flags({**settings, "trust_remote_code": False}))
    trainer, args = namespace["trainer"], namespace["training_args"]
    assert (args.scale_rewards, args.output_dir, trainer.args is args) == ("none", "out", True)
    assert trainer.model.dtype == torch.bfloat16
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_script_with_a_file_a_mixture_and_an_adapter(
    run: Run, settings: dict[str, Any], rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OF_THE_FILE", raising=False)
    del settings["dataset_name"]
    content = {**settings, "env": {"OF_THE_FILE": 1}, "datasets": [{"path": str(rows), "columns": ["prompt"]}] * 2}
    content |= {"use_peft": True, "lora_target_modules": ["q_proj"], "lora_r": 2, "unknown_to_the_script": 3}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    namespace = run("--config", str(tmp_path / "run.yaml"), "--lora_r", "4")
    adapter = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["target_modules"]) == (4, ["q_proj"])
    assert namespace["model_args"].lora_r == 4
    assert namespace["training_args"].max_steps == 1


def test_parsed_records(tmp_path: Path) -> None:
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    (tmp_path / "run.yaml").write_text("beta: 0.1\nmodel_revision: v2\nno_such_key: 1\n")
    file = ["--config", str(tmp_path / "run.yaml")]
    common = ["--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match="unknown keys: no_such_key"):
        parser.parse_args_and_config([*file, *common])
    script, config, model, rest = parser.parse_args_and_config([*file, *common], return_remaining_strings=True)
    assert (config.beta, model.model_revision, model.dtype, rest) == (0.1, "v2", "float32", ["--no_such_key", "1"])
    assert isinstance(script, ScriptArguments)
    *_, config = TrlParser([GRPOConfig]).parse_args_and_config(
        [f"--config={tmp_path / 'run.yaml'}", *common], fail_with_unknown_args=False
    )
    assert config.beta == 0.1
    with pytest.raises(SystemExit):
        TrlParser([GRPOConfig]).parse_args_and_config([*common, "--config"])
    assert (get_peft_config(model), get_quantization_config(model), get_kbit_device_map()) == (None, None, None)
    *_, config, _ = TrlParser([GRPOConfig, ModelConfig]).parse_args_and_config([*common, "--beta", "0.2"])
    assert config.beta == 0.2


@dataclass
class OwnConfig(GRPOConfig):
    system_prompt: str | None = None
    max_train_rows: int = 5


@dataclass
class OwnArguments:
    max_prompt_length: int = 512
    prompt_column: str = "prompt"


def test_a_script_may_add_fields(tmp_path: Path) -> None:
    """Those of `groupgrad train` and of earlier releases are not taken, whatever the order of the records."""
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--system_prompt", "Think.", "--max_prompt_length", "7"]
    (tmp_path / "run.yaml").write_text("prompt_column: question\nmax_train_rows: 3\n")
    flags += ["--config", str(tmp_path / "run.yaml")]
    for kinds in ((ScriptArguments, OwnConfig, ModelConfig, OwnArguments), (OwnArguments, OwnConfig, ScriptArguments)):
        records = TrlParser(kinds).parse_args_and_config(flags)
        assert tuple(type(record) for record in records) == kinds
        by_kind = {type(record): record for record in records}
        assert by_kind[OwnArguments] == OwnArguments(7, "question")
        assert (by_kind[OwnConfig].system_prompt, by_kind[OwnConfig].max_train_rows) == ("Think.", 3)
        assert by_kind[OwnConfig].max_prompt_length is None


def test_the_dtype_by_its_older_name(tmp_path: Path) -> None:
    """Recipes of earlier releases set `torch_dtype`, and their scripts read it."""
    (tmp_path / "run.yaml").write_text("torch_dtype: bfloat16\n")
    (model,) = TrlParser(ModelConfig).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    assert (model.dtype, model.torch_dtype) == ("bfloat16", "bfloat16")
    assert (ModelConfig(dtype="auto").torch_dtype, ModelConfig().torch_dtype) == ("auto", "float32")
    assert (ModelConfig(torch_dtype="float32", dtype="float32").dtype) == "float32"
    with pytest.raises(ValueError, match=r"dtype='auto' and torch_dtype='bfloat16'.*one setting.*set dtype alone"):
        ModelConfig(dtype="auto", torch_dtype="bfloat16")


def test_the_model_record_has_the_trust_of_older_scripts(tmp_path: Path) -> None:
    """They read it there; today's flag is that of `GRPOConfig`."""

    @dataclass
    class Extended(ModelConfig):
        system_prompt: str | None = None

        def __post_init__(self) -> None:
            super().__post_init__()

    flags = ["--output_dir", str(tmp_path), "--use_cpu"]
    for kind in (ModelConfig, Extended):
        for given in ([], ["--trust_remote_code"], ["--trust_remote_code", "true"]):
            config, model = TrlParser((GRPOConfig, kind)).parse_args_and_config([*flags, *given])
            assert model.trust_remote_code is config.trust_remote_code is bool(given)
    assert HfArgumentParser((GRPOConfig, ModelConfig)).parse_args_into_dataclasses(flags)[1].trust_remote_code is False
    assert ModelConfig("m", trust_remote_code=True).trust_remote_code
    assert (ModelConfig().trust_remote_code, ModelConfig("m").model_name_or_path) == (False, "m")


def test_a_field_of_two_records_is_refused() -> None:
    @dataclass
    class Conflicting:
        beta: float = 0.5

    with pytest.raises(ValueError, match=r"Conflicting and GRPOConfig both have a field 'beta'.* rename"):
        TrlParser((GRPOConfig, Conflicting))


def test_the_parser_of_transformers_reads_the_records(tmp_path: Path) -> None:
    """Scripts parse their records by `HfArgumentParser` too, from flags, a dict or a file."""
    records: Any = (OwnArguments, ScriptArguments, ModelConfig)
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--beta", "0.3"]
    flags += ["--vllm_server_base_url", "http://one:8000"]
    (config,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(flags)
    assert (config.beta, config.vllm_server_base_url) == (0.3, "http://one:8000")
    own, script, model = HfArgumentParser(records).parse_dict({"prompt_column": "q", "dtype": "auto"})
    assert (own.prompt_column, script.dataset_name, model.dtype) == ("q", None, "auto")
    (config,) = HfArgumentParser(GRPOConfig).parse_dict({"output_dir": str(tmp_path), "use_cpu": True, "bf16": False})
    assert config.vllm_server_base_url is None


def test_a_script_may_keep_the_settings_that_the_signature_has(tmp_path: Path) -> None:
    """Scripts for several releases of TRL filter their settings by the fields that the installed one knows."""

    @dataclass
    class Extended(GRPOConfig):
        system_prompt: str | None = None

    wanted = {"output_dir": str(tmp_path), "beta": 0.1, "use_cpu": True, "of_another_release": 3}
    for kind, further in ((GRPOConfig, {}), (Extended, {"system_prompt": "Think."})):
        known = inspect.signature(kind).parameters
        config = kind(**{name: value for name, value in {**wanted, **further}.items() if name in known})
        assert (config.beta, config.use_cpu) == (0.1, True)
    assert "system_prompt" not in inspect.signature(GRPOConfig).parameters


def test_what_else_trl_exports_is_imported_from_there() -> None:
    """A name that groupgrad lacks is an import error, for every name and path of the installed release."""
    import trl
    import trl.scripts
    import trl.trainer

    packages = {"": trl, "trainer": trl.trainer, "scripts": trl.scripts}
    places = [
        (".".join(filter(None, (where, module) if where else ())), where, name)
        for where, package in packages.items()
        for module, names in package._import_structure.items()  # pyright: ignore
        for name in names
    ]
    missing = {name for *_, name in places if name not in groupgrad._MODULES}
    assert {"RichProgressCallback", "SFTTrainer", "maybe_apply_chat_template", "disable_dropout_in_model"} <= missing
    assert {"GRPOTrainer", "ModelConfig", "TrlParser"} <= {name for *_, name in places} - missing
    for module, package, name in places:
        for where in {module, package}:
            found: dict[str, Any] = {}
            statement = f"from {'.'.join(filter(None, ('groupgrad', where)))} import {name}"
            if name in missing:
                with pytest.raises(ImportError, match=f"cannot import name '{name}'|groupgrad has no {name}: "):
                    exec(statement)
            else:
                exec(statement, found)
                assert found[name] is getattr(groupgrad, name)
    assert not hasattr(groupgrad, "no_such_name")
    assert not hasattr(groupgrad.trainer, "no_such_name")


def test_modules_that_scripts_import_from() -> None:
    found: dict[str, Any] = {}
    for statement in (
        "from groupgrad.trainer.grpo_trainer import GRPOTrainer, RewardFunc, RolloutFunc",
        "from groupgrad.trainer.utils import get_peft_config",
        "from groupgrad.scripts import utils",
        "import groupgrad.trainer.grpo_config as config",
    ):
        exec(statement, found)
    assert (found["GRPOTrainer"], found["config"].GRPOConfig) == (groupgrad.GRPOTrainer, GRPOConfig)
    assert found["utils"].TrlParser is TrlParser
    with pytest.raises(ImportError, match=r"no is_conversational: import it from trl\.data_utils"):
        exec("from groupgrad.data_utils import is_conversational")
    with pytest.raises(ImportError, match=r"no profiling_context: import it from trl\.extras\.profiling"):
        exec("from groupgrad.extras.profiling import profiling_context")
    with pytest.raises(ImportError, match=r"no SFTTrainer: import it from trl$"):
        exec("from groupgrad import GRPOTrainer, SFTTrainer")
    with pytest.raises(ImportError, match=r"no generate_rollout_completions: .* trainer\.sample_completions"):
        exec("from groupgrad.experimental.openenv import generate_rollout_completions")
    assert not hasattr(found["config"], "_a_mark_of_the_script")
    for unknown in ("groupgrad.trainer.no_such", "groupgrad.no_such"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(unknown)


def test_mixtures(rows: Path) -> None:
    part = {"path": str(rows), "columns": ["prompt"]}
    joined = get_dataset(DatasetMixtureConfig([part, part], test_split_size=4))  # pyright: ignore
    assert {name: len(split) for name, split in joined.items()} == {"train": 12, "test": 4}
    shared = get_dataset(DatasetMixtureConfig([{**part, "fraction": 3.0}, {**part, "fraction": 1.0}]))  # pyright: ignore
    assert shared["train"]["prompt"] == [f"{a}+1=" for a in [*range(8), 0, 1, 2]][: len(shared["train"])]
    assert len(shared["train"]) == 8 + round(8 / 3)
    streamed = get_dataset(DatasetMixtureConfig([part], streaming=True))  # pyright: ignore
    assert next(iter(streamed["train"])) == {"prompt": "0+1="}
    with pytest.raises(ValueError, match="1 of 2 datasets have no fraction"):
        get_dataset(DatasetMixtureConfig([{**part, "fraction": 1.0}, part]))  # pyright: ignore
    with pytest.raises(ValueError, match="datasets is empty"):
        get_dataset(DatasetMixtureConfig())


def test_reward_functions_by_their_modules_and_pickled() -> None:
    from groupgrad.rewards.accuracy_rewards import accuracy_reward, reasoning_accuracy_reward
    from groupgrad.rewards.format_rewards import think_format_reward
    from groupgrad.rewards.other_rewards import get_soft_overlong_punishment as punishment

    assert punishment is get_soft_overlong_punishment
    built = [get_soft_overlong_punishment(10, 4), get_repetition_penalty_reward(), get_cosine_scaled_reward(10)]
    for function in (accuracy_reward, reasoning_accuracy_reward, think_format_reward, *built):
        copy = pickle.loads(pickle.dumps(function))
        assert copy.__name__ == function.__name__
    assert pickle.loads(pickle.dumps(built[0]))(completion_ids=[[1] * 8]) == [-0.5]
