"""`groupgrad train` builds the trainer from the command line, trains, saves and pushes; a fake trainer records it."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import own_loss
import pytest
import torch

from groupgrad.apps.cli import main as cli
from groupgrad.apps.cli import train
from groupgrad.apps.cli.arguments import ModelArguments, TaskArguments
from groupgrad.config import GRPOConfig
from groupgrad.errors import CheckpointError, CheckpointNotSaved

ROOT = Path(__file__).parents[2]


class FakeTrainer:
    """Records its arguments and calls."""

    instances: list[FakeTrainer]

    def __init__(self, **arguments):
        self.arguments, self.calls = arguments, []
        self.recorder = types.SimpleNamespace(command=None)
        FakeTrainer.instances.append(self)

    def train(self):
        self.calls.append(("train", self.arguments["args"].resume_from_checkpoint))

    def save_model(self, output_dir):
        self.calls.append(("save_model", output_dir))

    def push_to_hub(self, dataset_name=None):
        self.calls.append(("push_to_hub", dataset_name))


@pytest.fixture(autouse=True)
def _fakes(monkeypatch, tmp_path):
    FakeTrainer.instances = []
    monkeypatch.setitem(sys.modules, "groupgrad.trainer", types.SimpleNamespace(GRPOTrainer=FakeTrainer))
    rewards = {"accuracy_reward": len, "think_format_reward": max}
    monkeypatch.setattr(train, "_BUILT_IN", rewards)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "some" / "model").mkdir(parents=True)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}))


BASE = [
    *("--use_cpu", "--dataset_name", "rows.jsonl"),
    *("--model_name_or_path", "some/model", "--prompt_column", "question"),
]


def test_a_loss_of_ones_own_is_checked_before_a_run(tmp_path, capsys):
    (tmp_path / "losses_from_here").mkdir()
    shutil.copy(own_loss.__file__, tmp_path / "losses_from_here" / "scaled.py")
    argv = [*BASE, "--reward_funcs", "accuracy_reward", "--loss_type", "losses_from_here.scaled"]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", *argv, "--loss_settings", '{"factor": 0}'])
    assert "loss_settings has factor=0, which trains nothing. Set it to more than 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", *argv, "--loss_type", "losses_from_here.absent"])
    assert "'losses_from_here.absent' cannot be imported" in capsys.readouterr().err


def test_resuming_and_pushing():
    argv = [*BASE, "--reward_funcs", "accuracy_reward", "--resume_from_checkpoint", "true", "--push_to_hub"]
    assert cli.main(["train", *argv, "--hub_model_id", "me/x", "--output_dir", "out"]) == 0
    (trainer,) = FakeTrainer.instances
    assert trainer.calls == [("train", "true"), ("save_model", "out"), ("push_to_hub", "rows.jsonl")]
    given = trainer.arguments
    assert (given["model"], given["reward_funcs"], given["eval_dataset"]) == ("some/model", [len], None)
    assert given["train_dataset"][0]["prompt"] == [{"role": "user", "content": "1+1?"}] and "peft_config" not in given


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--use_cpu"],
            "no reward is given; set reward_funcs to built-in names (accuracy_reward, think_format_reward)",
        ),
        (["--use_cpu", "--reward_funcs", "acuracy_reward"], "did you mean 'accuracy_reward'?"),
        (["--use_cpu", "--reward_funcs", "nowhere.reward"], "'nowhere.reward' cannot be imported"),
        (["--use_cpu", "--reward_funcs", "json.__name__"], "is a str, not a reward function"),
        (["--use_cpu", "--reward_funcs", "accuracy_reward", "--eval_reward_funcs", "fomat"], "no built-in reward"),
        (["--use_cpu", "--reward_funcs", "accuracy_reward"], "no model is given; set model_name_or_path"),
        ([*BASE[:3], "--reward_funcs", "accuracy_reward", *BASE[3:5]], "set prompt_column"),
        ([*BASE, "--reward_model_name_or_path", "./none"], "reward_model_name_or_path='./none': there is no such"),
        ([*BASE, "--reward_funcs", "accuracy_reward", "--load_in_4bit", "--load_in_8bit"], "are both True"),
    ],
)
def test_a_run_that_cannot_begin_ends_with_a_sentence(argv, text, capsys):
    assert cli.main(["train", *argv]) == 2
    assert text in capsys.readouterr().err
    assert FakeTrainer.instances == []


def test_rewards_of_your_own_from_the_current_folder(tmp_path):
    (tmp_path / "my_rewards_for_test.py").write_text("def length(completions, **kwargs):\n    return [1.0]\n")
    for spelling in ("my_rewards_for_test.length", "my_rewards_for_test:length"):
        assert train.load_reward(spelling)([]) == [1.0]
    both = TaskArguments(reward_funcs=["accuracy_reward"], reward_model_name_or_path="some/reward")
    assert train.load_rewards(both) == [len, "some/reward"]


def test_rewards_of_evaluation_are_named_like_those_of_training(tmp_path):
    (tmp_path / "run.yaml").write_text("eval_strategy: epoch\neval_reward_funcs: think_format_reward\n")
    given = [*BASE, "--reward_funcs", "accuracy_reward", "--dataset_test_name", "rows.jsonl", "--config", "run.yaml"]
    assert cli.main(["train", *given]) == 0
    assert cli.main(["train", *given, "--eval-reward-funcs", "accuracy_reward", "json:dumps"]) == 0
    with pytest.warns(UserWarning, match=r"no effect: eval_reward_funcs=.* without evaluation; set eval_strategy"):
        assert cli.main(["train", *given, "--eval_strategy", "no"]) == 0
    found = [trainer.arguments.get("eval_reward_funcs") for trainer in FakeTrainer.instances]
    assert found == [[max], [len, json.dumps], None]


def test_loading_options_reach_the_config():
    config = GRPOConfig(use_cpu=True, model_init_kwargs={"device_map": None})
    model = ModelArguments(model_name_or_path="m", dtype="bfloat16", model_revision="v1", attn_implementation="eager")
    assert train.take_model_options(model, config) == "m"
    assert config.model_init_kwargs == {
        "device_map": None,
        "revision": "v1",
        "dtype": "bfloat16",
        "attn_implementation": "eager",
    }


@pytest.mark.parametrize(
    ("flags", "kwargs", "text"),
    [
        ({"dtype": "float16"}, {"dtype": "float32"}, "model_init_kwargs has dtype='float32'; set it in one place"),
        ({"dtype": "half"}, None, "dtype='half' is not known; set it to one of auto"),
    ],
)
def test_loading_options_that_contradict(flags, kwargs, text):
    with pytest.raises(ValueError, match=text):
        train.take_model_options(
            ModelArguments(model_name_or_path="m", **flags), GRPOConfig(use_cpu=True, model_init_kwargs=kwargs)
        )


def adapter(**flags):
    return train.peft_config(ModelArguments(use_peft=True, **flags))


def test_every_flag_of_the_adapter():
    pytest.importorskip("peft")
    assert train.peft_config(ModelArguments()) is None
    config = adapter()
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (16, 32, 0.05, "CAUSAL_LM")
    assert config.target_modules is None
    assert adapter(lora_target_modules=["all-linear"]).target_modules == "all-linear"
    # The documents write --lora_target_modules "q_proj", "v_proj", of which the shell keeps the comma.
    config = adapter(lora_target_modules=["q_proj,", "v_proj"], use_rslora=True, lora_r=4)
    assert (config.target_modules, config.use_rslora, config.r) == ({"q_proj", "v_proj"}, True, 4)
    config = adapter(
        lora_r=8,
        lora_alpha=4,
        lora_dropout=0.0,
        lora_target_parameters=["mlp.experts.down_proj,", "mlp.experts.gate_up_proj"],
        lora_modules_to_save=["lm_head"],
        lora_task_type="SEQ_CLS",
        use_dora=True,
    )
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (8, 4, 0.0, "SEQ_CLS")
    assert config.target_parameters == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert (config.modules_to_save, config.use_dora, config.use_rslora) == (["lm_head"], True, False)


def test_adapter_flags_without_use_peft():
    with pytest.warns(UserWarning, match="no effect: lora_r=8, use_dora=True without use_peft; set use_peft"):
        assert train.peft_config(ModelArguments(lora_r=8, use_dora=True)) is None


def test_quantized_weights():
    pytest.importorskip("bitsandbytes")
    quantized = lambda **flags: train.quantization_config(ModelArguments(**flags))  # noqa: E731
    assert quantized() is None
    config = quantized(load_in_4bit=True)
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", False)
    assert (config.bnb_4bit_compute_dtype, config.bnb_4bit_quant_storage) == (torch.float32, torch.uint8)
    packed = {"bnb_4bit_quant_type": "fp4", "use_bnb_nested_quant": True, "bnb_4bit_quant_storage": "bfloat16"}
    config = quantized(load_in_4bit=True, dtype="bfloat16", **packed)
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("fp4", True)
    assert (config.bnb_4bit_compute_dtype, config.bnb_4bit_quant_storage) == (torch.bfloat16, torch.bfloat16)
    config = quantized(load_in_8bit=True)
    assert (config.load_in_8bit, config.load_in_4bit) == (True, False)


def test_the_gsm8k_example_builds_a_run(tmp_path):
    argv = ["--config", str(ROOT / "examples" / "gsm8k.yaml"), "--dataset_name", "rows.jsonl"]
    assert cli.main(["train", *argv, "--model_name_or_path", "some/model", "--max_steps", "2"]) == 0
    arguments = FakeTrainer.instances[0].arguments
    assert arguments["train_dataset"][0]["solution"] == "2"
    config = arguments["args"]
    assert (config.max_steps, config.bf16, config.use_cpu, config.report_to) == (2, False, True, [])
    assert config.model_init_kwargs == {"dtype": "float32"}


# --- The command itself ---


def test_commands(capsys):
    assert cli.main([]) == 2
    assert "train" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "groupgrad 0.1.0\n"


def test_errors_of_checkpoints_have_exit_codes(monkeypatch, capsys):
    argv = ["train", *BASE, "--reward_funcs", "accuracy_reward", "--resume_from_checkpoint", "auto"]
    full, lost = OSError(28, "No space left on device"), CheckpointError("optimizer.pt is missing")
    runs = [(lost, None, 2, "missing"), (CheckpointNotSaved("7 bytes free"), None, 73, "has written the model to")]
    runs += [(CheckpointNotSaved("7 bytes free"), full, 73, "No space left"), (None, full, 73, "No space left")]
    for of_training, of_saving, status, text in runs:

        def train(self, error=of_training):
            if error is not None:
                raise error

        def save_model(self, output_dir, error=of_saving):
            self.calls.append("saved")
            if error is not None:
                raise error

        monkeypatch.setattr(FakeTrainer, "train", train)
        monkeypatch.setattr(FakeTrainer, "save_model", save_model)
        assert cli.main(argv) == status
        assert FakeTrainer.instances[-1].calls == (["saved"] if status == 73 else [])
        message = capsys.readouterr().err
        assert text in message.split("groupgrad train: error: ")[1]
