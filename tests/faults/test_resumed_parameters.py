"""A run resumes only with the parameters that its checkpoint has trained, each with its own optimizer state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import repeatable_runs
import torch
from peft import LoraConfig, get_peft_model
from small_runs import weights
from transformers import PreTrainedModel

from groupgrad import GRPOTrainer
from groupgrad.errors import CheckpointError


def model_of(**config: Any) -> PreTrainedModel:
    """A small model; equal for equal settings."""
    model = repeatable_runs.BASE.make_model(0, initializer_range=0.15, **config)
    model.generation_config.eos_token_id = repeatable_runs.EOS
    return model


def training_only(*parts: str, **config: Any) -> PreTrainedModel:
    """A small model of which the parameters train whose names contain one of `parts`."""
    model = model_of(**config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    return model


def adapted(**settings: Any) -> Any:
    """A small model with a LoRA adapter."""
    torch.manual_seed(3)
    return get_peft_model(model_of(), LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """`runs(kind)`: the checkpoint of the second step of a run of one of the `KINDS`, and its weights at the end."""
    made: dict[str, tuple[Path, torch.Tensor]] = {}

    def run(kind: str) -> tuple[Path, torch.Tensor]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            trainer = make(folder, KINDS[kind](), max_steps=3)
            trainer.train()
            made[kind] = folder / "checkpoint-2", weights(trainer.model)
        return made[kind]

    return run


@pytest.fixture(scope="module")
def saved(runs: Callable[[str], tuple[Path, torch.Tensor]]) -> Callable[[str], Path]:
    """`saved(kind)`: that checkpoint."""
    return lambda kind: runs(kind)[0]


def saved_start(folder: Path) -> Path:
    """A folder with a small model and its tokenizer."""
    model_of().save_pretrained(folder)
    repeatable_runs.BASE.make_tokenizer().save_pretrained(folder)
    return folder


KINDS: dict[str, Callable[[], Any]] = {
    "full": model_of,
    "gates": lambda: training_only("gate_proj"),
    "layer_0": lambda: training_only("layers.0."),
    "tied": lambda: model_of(tie_word_embeddings=True),
    "adapter": adapted,
}


def make(folder: Path, model: Any, **settings: Any) -> GRPOTrainer:
    return repeatable_runs.make_trainer(
        folder, model=model, **{"max_steps": 2, "save_steps": 2, "learning_rate": 1e-3, **settings}
    )


def from_elsewhere(checkpoint: Path, folder: Path) -> Path:
    """A copy as transformers and TRL write checkpoints, and groupgrad did before it named trained parameters."""
    copy = Path(shutil.copytree(checkpoint, folder / checkpoint.name))
    for path in (copy / "manifest.json", *copy.glob("groupgrad_state_*")):
        path.unlink()
    return copy


CASES: dict[str, tuple[str, Callable[[], Any], str]] = {
    "same number and shapes": (
        "gates",
        lambda: training_only("up_proj"),
        r"not trained then: model\.layers\.0\.mlp\.up_proj\.weight \(float32 48x32\), model\.layers\.1\.mlp\.up_proj.*"
        r"trained then and not now: model\.layers\.0\.mlp\.gate_proj\.weight.*freeze and train what "
        r"its run.*allow_partial_resume=True",
    ),
    "another layer": (
        "layer_0",
        lambda: training_only("layers.1."),
        r"not trained then: model\.layers\.1\..*and 7 more",
    ),
    "same number, other shapes": ("gates", lambda: training_only("down_proj"), r"down_proj\.weight \(float32 32x48\)"),
    "another number": ("gates", model_of, r"not trained then: model\.embed_tokens\.weight.*allow_partial_resume=True"),
    "another dtype": (
        "full",
        lambda: model_of().bfloat16(),
        r"changed: model\.embed_tokens\.weight is float32 92x32 there and bfloat16 92x32 here.*allow_partial_resume",
    ),
    "other target_modules": (
        "adapter",
        lambda: adapted(target_modules=["k_proj", "v_proj"]),
        r"target_modules was \['q_proj', 'v_proj'\].*\['k_proj', 'v_proj'\] now.*k_proj\.lora_A\.default\.weight.*"
        r"give the adapter the settings that it had",
    ),
    "another alpha": ("adapter", lambda: adapted(lora_alpha=32), r"lora_alpha was 8 and is 32 now"),
    "another rank": (
        "adapter",
        lambda: adapted(r=8),
        r"r was 4 and is 8 now.*q_proj\.lora_A\.default\.weight is float32 4x",
    ),
    "adapter, now none": ("adapter", model_of, r"holds a LORA adapter.*pass the peft_config that it was made with"),
    "none, now an adapter": ("full", adapted, r"holds a whole model and this run trains an adapter"),
    "tied, now not": ("tied", model_of, r"not trained then: lm_head\.weight.*load the model that it began with"),
    "not tied, now tied": (
        "full",
        lambda: model_of(tie_word_embeddings=True),
        r"trained then and not now: lm_head\.weight",
    ),
    "deeper": (
        "full",
        lambda: model_of(num_hidden_layers=3),
        r"not trained then: model\.layers\.2\.self_attn\.q_proj\.weight \(float32 32x32\)",
    ),
    "wider": ("full", lambda: model_of(intermediate_size=64), r"mlp\.gate_proj\.weight is float32 48x32 there and"),
}
"""What differs → kind of the checkpoint, the model of the run that resumes, the error."""

FOUND_WHILE_LOADING = set(CASES) - {"same number and shapes", "another layer", "another dtype"}
"""The cases in which weights or the optimizer's state of a checkpoint without names do not fit."""


@pytest.mark.quick("another rank", "deeper", "none, now an adapter", "tied, now not")
@pytest.mark.parametrize("case", CASES)
def test_another_set_of_parameters_is_refused_by_name(case, saved, tmp_path, caplog):
    kind, model, text = CASES[case]
    trainer = make(tmp_path / "run", model(), max_steps=3)
    before = weights(trainer.model)
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        trainer.train(str(saved(kind)))
    assert torch.equal(weights(trainer.model), before)
    if case in FOUND_WHILE_LOADING:
        with pytest.raises((CheckpointError, RuntimeError), match=r"To go on|allow_partial_resume=True|size mismatch"):
            trainer.train(str(from_elsewhere(saved(kind), tmp_path)))
    assert "missing keys" not in caplog.text


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_set_resumes_bit_for_bit_without_a_remark(kind, runs, tmp_path, caplog):
    saved, expected = runs(kind)
    for checkpoint in (saved, from_elsewhere(saved, tmp_path)):
        caplog.clear()
        resumed = make(tmp_path / "resumed", KINDS[kind](), max_steps=3)
        with caplog.at_level("WARNING"):
            resumed.train(str(checkpoint))
        assert torch.equal(weights(resumed.model), expected)
        assert "missing keys" not in caplog.text and "options differ" not in caplog.text


@pytest.mark.parametrize("change", ["order", "groups"])
def test_a_reordering_is_refused(change, tmp_path, caplog):
    def optimizer(model: Any, change: str | None) -> torch.optim.Optimizer:
        norms = [p for name, p in model.named_parameters() if "norm" in name]
        others = [p for name, p in model.named_parameters() if "norm" not in name]
        if change == "order":  # of two of one shape, which no error of torch would tell
            norms[:2] = norms[1::-1]
        elif change == "groups":
            norms.append(others.pop())
        return torch.optim.AdamW([{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}])

    def run(change: str | None, **settings: Any) -> GRPOTrainer:
        model = model_of()
        return make(tmp_path, model, optimizers=(optimizer(model, change), None), max_steps=2, save_steps=1, **settings)

    run(None).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match="has the state of other parameters than this run trains"):
        run(change).train(checkpoint)
    resumed = run(change, allow_partial_resume=True)
    resumed.train(checkpoint)
    assert "starts anew" in caplog.text
    assert {int(state["step"]) for state in resumed.optimizer.state.values()} == {1}


def test_partly_the_same_parameters_begin_a_new_optimizer(saved, tmp_path, caplog):
    trainer = make(tmp_path, training_only("gate_proj", "norm"), allow_partial_resume=True, max_steps=3)
    trainer.train(str(saved("gates")))
    assert "allow_partial_resume" in caplog.text and "input_layernorm.weight (float32 32)" in caplog.text
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {1}


def test_partly_the_same_parameters_without_names_begin_anew(saved, tmp_path, caplog):
    checkpoint = from_elsewhere(saved("gates"), tmp_path)
    trainer = make(tmp_path, training_only("gate_proj", "norm"), allow_partial_resume=True, max_steps=3)
    trainer.train(str(checkpoint))
    assert "optimizer" in caplog.text and "starts anew" in caplog.text
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {1}


@pytest.mark.parametrize("optim", ["adafactor", "sgd"])
def test_other_optimizers_are_checked_too(optim, tmp_path):
    settings = {"optim": optim, "max_steps": 3}
    make(tmp_path / "straight", training_only("gate_proj", "norm"), **{**settings, "max_steps": 2}).train()
    with pytest.raises(CheckpointError, match="not trained then"):
        make(tmp_path, training_only("up_proj", "norm"), **settings).train(str(tmp_path / "straight" / "checkpoint-2"))
    checkpoint = from_elsewhere(tmp_path / "straight" / "checkpoint-2", tmp_path)
    make(tmp_path / "same", training_only("gate_proj", "norm"), **settings).train(str(checkpoint))


def test_the_manifest_names_what_is_trained_in_the_optimizers_order(saved):
    manifest = json.loads((saved("adapter") / "manifest.json").read_text())
    (first, text), *_ = manifest["trained"].items()
    assert first == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert text == "float32 4x32"
    assert len(manifest["trained"]) == 8
    assert manifest["adapter"]["lora_alpha"] == 8 and manifest["adapter"]["target_modules"] == ["q_proj", "v_proj"]
    full = json.loads((saved("full") / "manifest.json").read_text())
    assert full["adapter"] is None
    # Weights first, which decay, then the norms.
    names = list(full["trained"])
    assert (names[0], names[-1]) == ("model.embed_tokens.weight", "model.norm.weight")


class SaveEvery(repeatable_runs.TrainerCallback):
    """Changes how often a run saves when it begins."""

    def __init__(self, steps: int):
        self._steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.save_steps = self._steps


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def test_new_intervals_are_in_force_on_resume(saved, tmp_path, caplog):
    eval_set = repeatable_runs.Dataset.from_dict({"prompt": ["a", "b"]})
    trainer = make(
        tmp_path,
        model_of(),
        max_steps=8,
        save_steps=3,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=0.25,
        eval_dataset=eval_set,
    )
    with caplog.at_level("WARNING", logger="groupgrad"):
        trainer.train(str(saved("full")))
    assert checkpoints(tmp_path) == [3, 6, 8]
    logged = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [1, 2, 4, 8]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry] == [4, 6, 8]
    (message,) = [r.getMessage() for r in caplog.records if "options differ" in r.getMessage()]
    lines = {line.split()[0]: line.split(maxsplit=3)[1:] for line in message.splitlines()[1:]}
    assert lines["save_steps"] == ["2", "3", "now"]
    assert lines["logging_steps"] == ["1", "4", "now"]
    assert lines["eval_steps"] == ["500", "2", "now"]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_callback_may_change_an_interval_when_training_begins(resumed, saved, tmp_path):
    trainer = make(tmp_path, model_of(), max_steps=7, callbacks=[SaveEvery(3)])
    trainer.train(str(saved("full")) if resumed else None)
    assert checkpoints(tmp_path) == [3, 6, 7]


@pytest.mark.quick("full")
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
def test_another_reference_is_refused(adapter, tmp_path, caplog):
    start = saved_start(tmp_path / "start")
    settings: dict[str, Any] = {"beta": 0.1, "learning_rate": 1e-2, "max_steps": 3, "save_steps": 1}
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapter else None
    straight = make(tmp_path / "run", str(start), peft=peft, **settings)
    straight.train()
    kl = {e["step"]: e["kl"] for e in straight.state.log_history if "kl" in e}
    assert kl[3] > 0
    checkpoint = tmp_path / "run" / "checkpoint-2"
    other = make(tmp_path / "other", str(checkpoint), **settings)
    with pytest.raises(CheckpointError, match=rf"KL.*{start.name}.*model='.*start'.*allow_partial_resume=True"):
        other.train(str(checkpoint))
    same = make(tmp_path / "same", str(start), peft=peft, **settings)
    same.train(str(checkpoint))
    assert {e["step"]: e["kl"] for e in same.state.log_history if "kl" in e}[3] == kl[3]
    anew = make(tmp_path / "anew", str(checkpoint), allow_partial_resume=True, **settings)
    anew.train(str(checkpoint))
    assert "from which it is measured from now on" in caplog.text


def test_a_first_reference_is_named(tmp_path, caplog):
    start = saved_start(tmp_path / "start")
    settings: dict[str, Any] = {"learning_rate": 1e-2, "max_steps": 3, "save_steps": 1}
    make(tmp_path / "run", str(start), **settings).train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    kl = {}
    for model in (checkpoint, start):
        caplog.clear()
        trainer = make(tmp_path / f"from_{model.name}", str(model), beta=0.1, **settings)
        trainer.train(str(checkpoint))
        (message,) = [r.getMessage() for r in caplog.records if "options differ" in r.getMessage()]
        (line,) = [line for line in message.splitlines() if line.split()[0] == "beta"]
        assert line.split(maxsplit=3)[1:] == [
            "0.0",
            "0.1",
            f"now, the KL is measured from {str(model)!r} as it was loaded",
        ]
        (kl[model],) = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    # The third step's policy is the checkpoint: it is its own reference, and has moved from the model of the start.
    assert abs(kl[checkpoint]) < 1e-6 < kl[start]


def test_an_adapter_that_a_script_makes_at_random_has_the_same_reference(tmp_path):
    """Before training its second matrices are 0, so that the first ones, drawn without a seed, change nothing."""
    settings: dict[str, Any] = {"beta": 0.1, "max_steps": 3, "save_steps": 1}
    make(tmp_path / "run", adapted(), **settings).train()
    torch.manual_seed(99)
    model = get_peft_model(model_of(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(99)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.normal_()
    make(tmp_path / "again", model, **settings).train(str(tmp_path / "run" / "checkpoint-2"))
