"""Training with a real vLLM, colocated and on a server: samples come from the weights that train."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from openai import APITimeoutError
from real_vllm import SETTINGS, Served, vary
from scripted_agents import with_tools
from three_tokens import check_against_enumeration, starts_with_a, token_ids
from vllm_training import LARGE, logged, make_trainer

from groupgrad import GRPOTrainer
from groupgrad.apps.eval import measuring
from groupgrad.integrations.vllm import setup as vllm_setup
from groupgrad.integrations.vllm.colocate_start import ColocateOptions

COLOCATE = {"vllm_mode": "colocate", "vllm_max_model_length": 512}


@pytest.fixture(autouse=True)
def _quick_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start vLLM without compiling the model, which takes a minute."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        vllm_setup, "ColocateOptions", functools.partial(ColocateOptions, extra={"enforce_eager": True})
    )


@pytest.fixture(scope="module", autouse=True)
def tied_server(
    serve: Callable[..., Served], large_server: Callable[[], Served], make_model: Any, make_tokenizer: Any, folder: Path
) -> Iterator[Served]:
    """A server of a model with tied embeddings. Both servers start while tests sample in this process."""
    large_server()
    make_model(seed=97, tie_word_embeddings=True, **LARGE).save_pretrained(folder.with_name("tied"))
    make_tokenizer().save_pretrained(folder.with_name("tied"))
    served = serve(of=folder.with_name("tied")).start()
    yield served
    served.kill()


@pytest.fixture(scope="module")
def server(large_server: Callable[[], Served]) -> Callable[[], dict[str, Any]]:
    """Settings for a server of the model that takes adapters, started at first use."""

    def settings() -> dict[str, Any]:
        return {"vllm_mode": "server", "vllm_server_port": large_server().port}

    return settings


@pytest.fixture
def train(
    make_model: Any, tokenizer: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., GRPOTrainer]]:
    """`train(mode, **config fields)`: a trainer after training, or before it with `run=False`."""
    made: list[GRPOTrainer] = []

    def make(mode: str, *, run: bool = True, model: Any = None, **settings: Any) -> GRPOTrainer:
        where = COLOCATE if mode == "colocate" else request.getfixturevalue("server")()
        model = vary(make_model(seed=3, **LARGE), 3) if model is None else model
        trainer = make_trainer(model, tokenizer, tmp_path / "run", **{**where, **settings})
        made.append(trainer)
        if run:
            trainer.train()
        return trainer

    yield make
    for trainer in made:
        assert trainer.vllm_policy is not None
        trainer.vllm_policy.close()


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], **changes})


@pytest.fixture(scope="module", params=["colocate", "server"])
def mode(request: pytest.FixtureRequest) -> str:
    """One mode at a time: all tests of one, then of the other."""
    return request.param


def assert_in_step(trainer: Any, versions: list[int], *, nats: float = 1e-3) -> None:
    """Generation batches came from the weights of these steps, and vLLM's log-probs are training's."""
    watch = trainer.watch
    assert watch.policy_steps == versions
    assert watch.gap < nats
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < nats
    if len(versions) == len(logged(trainer, "sampling/importance_sampling_ratio/mean")):
        assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx(
            [1] * len(versions), abs=nats
        )
    # Steps are large enough to change the samples, so weights of another step would be detected.
    size = len(watch.texts) // len(versions)
    batches = [watch.texts[i : i + size] for i in range(0, len(watch.texts), size)]
    assert all(one != other for one, other in itertools.pairwise(batches))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_each_generation_batch_is_sampled_from_the_weights_that_train(mode: str, beta: float, train: Any) -> None:
    trainer = train(mode, beta=beta)
    assert_in_step(trainer, [0, 1, 2])
    assert logged(trainer, "reward_std") and len(logged(trainer, "time/weights")) == 3
    assert bool(logged(trainer, "kl")) == (beta > 0)


def test_an_evaluation_samples_by_options_of_its_own(mode: str, train: Any) -> None:
    """With one token to choose from all completions of a prompt are equal; those of training are not."""
    trainer = train(
        mode,
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_sampling={"top_k": 1, "max_completion_length": 5, "num_generations": 4},
        eval_k=[1, 4],
        arguments={"eval_dataset": Dataset.from_dict({"prompt": ["a", "bc", "def"]})},
    )
    assert logged(trainer, "eval_frac_reward_zero_std") == [1.0] and logged(trainer, "frac_reward_zero_std") != [1.0]
    assert logged(trainer, "eval_completions/max_length")[0] <= 5 < logged(trainer, "completions/max_length")[0]
    assert logged(trainer, "eval_pass@1") == logged(trainer, "eval_pass@4")


def test_an_evaluation_has_the_enumerated_probabilities(mode: str, train: Any, tokenizer: Any) -> None:
    """The model has three tokens; tests/eval/test_measuring.py has the other engines."""
    prompts = ["ab", "c", "7"]
    trainer = train(
        mode,
        run=False,
        num_generations_eval=400,
        per_device_eval_batch_size=1200,
        max_completion_length=2,
        generation_kwargs={"allowed_token_ids": token_ids(tokenizer)},
        arguments={"reward_funcs": starts_with_a},
    )
    settings = dict.fromkeys(("by", "seed"))
    rows = Dataset.from_dict({"prompt": prompts})
    found = measuring.evaluate(trainer, rows, "model", settings, answers=None, by=None)
    check_against_enumeration(found, trainer.model, tokenizer, prompts)


def test_a_loss_that_is_anchored_on_the_sampler(mode: str, train: Any) -> None:
    trainer = train(mode, loss_type="dppo_tv", steps_per_generation=2, max_steps=4)
    assert_in_step(trainer, [0, 2])
    assert len(logged(trainer, "grad_norm")) == 4 and all(value > 0 for value in logged(trainer, "grad_norm"))


def test_a_program_asks_an_address_that_vllm_answers(mode: str, train: Any, tokenizer: Any) -> None:
    """Its second request continues the first one's tokens, and vLLM's log-probs are those of training."""
    tokenizer = with_tools(tokenizer)

    async def solve(row: dict[str, Any], session: Any) -> float:
        client, said = session.async_openai(), [{"role": "user", "content": row["prompt"]}]
        with pytest.raises(APITimeoutError):  # vLLM samples no further, and the row has nothing of it
            await client.chat.completions.create(model="m", messages=said, max_tokens=50, timeout=0.01)
        for _ in range(2):
            answer = await client.chat.completions.create(model="m", messages=said, max_tokens=6)
            said += [{"role": "assistant", "content": answer.choices[0].message.content}, said[0]]
        return float(len(said[1]["content"]))

    trainer = train(mode, max_completion_length=60, arguments={"agent": solve, "reward_funcs": None})
    assert logged(trainer, "rollouts/turns") == [2.0] * 3 and logged(trainer, "rollouts/branches") == [0.0] * 3
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 1e-3


@pytest.mark.parametrize("updates", ["adapter", "merge"])
def test_adapters_are_sampled_alone_or_merged(mode: str, updates: str, train: Any, monkeypatch: Any) -> None:
    trainer = train(
        mode, run=False, vllm_lora_updates=updates, beta=0.1, learning_rate=5e-2, arguments={"peft_config": lora()}
    )
    merged: list[int] = []
    push = trainer.engine.engine.push
    monkeypatch.setattr(
        trainer.engine.engine, "push", lambda model, step, **kept: [merged.append(step), push(model, step, **kept)][1]
    )
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items() if "lora_" not in name}
    trainer.train()
    assert_in_step(trainer, [0, 1, 2])
    assert merged == ([0, 1, 2] if updates == "merge" else [])
    after = trainer.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    # The reference is the base model, which the policy equals before its first step.
    assert logged(trainer, "kl")[0] == 0 < logged(trainer, "kl")[2]


def test_a_head_that_is_the_embedding_follows_it(mode: str, train: Any, make_model: Any, tied_server: Served) -> None:
    policy = vary(make_model(seed=3, tie_word_embeddings=True, **LARGE), 3)
    where = {"vllm_server_port": tied_server.port} if mode == "server" else {}
    assert_in_step(train(mode, model=policy, **where), [0, 1, 2])


def test_a_policy_in_bfloat16_is_sampled_in_bfloat16(train: Any, make_model: Any) -> None:
    policy = vary(make_model(seed=3, **LARGE), 3).to(torch.bfloat16)
    trainer = train("colocate", model=policy)
    # Both sides have eight bits of mantissa, and round at different places.
    assert trainer.watch.policy_steps == [0, 1, 2] and trainer.watch.gap < 0.2
    assert 0 < max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.05
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1] * 3, abs=0.1)


@pytest.mark.parametrize(
    ("mode", "field"), [("colocate", "vllm_guided_decoding_regex"), ("server", "vllm_structured_outputs_regex")]
)
def test_every_completion_matches_the_regex(mode: str, field: str, train: Any) -> None:
    seen: list[str] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [float(text.count("a")) for text in completions]

    plain = {"vllm_importance_sampling_correction": False}
    trainer = train(mode, arguments={"reward_funcs": reward}, **{field: r"<[abc]{2,4}>[0-9]"}, **plain)
    assert len(seen) == 24 and len(set(seen)) > 4
    assert [text for text in seen if not re.fullmatch(r"<[abc]{2,4}>[0-9]", text)] == []
    assert min(logged(trainer, "grad_norm")) > 0 and not logged(trainer, "sampling/importance_sampling_ratio/mean")


CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [1-9], "b": [1-9]\}\}</tool_call>'


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: other
    """
    return a + b


def test_agents_call_tools(mode: str, train: Any, tokenizer: Any) -> None:
    transcripts: list[list[dict[str, Any]]] = []

    def reward(completions: list[list[dict[str, Any]]], **columns: Any) -> list[float]:
        transcripts.extend(completions)
        return [float(next(int(m["content"]) for m in messages if m["role"] == "tool")) for messages in completions]

    with_tools(tokenizer)
    rows = [{"prompt": [{"role": "user", "content": f"{a}?"}]} for a in range(4)]
    trainer = train(
        mode,
        max_steps=2,
        vllm_structured_outputs_regex=CALL,
        vllm_importance_sampling_correction=False,
        max_tool_calling_iterations=1,
        max_completion_length=200,
        arguments={"reward_funcs": reward, "tools": [add], "train_dataset": Dataset.from_list(rows)},
    )
    assert len(transcripts) == 16
    for messages in transcripts:
        (arguments, answer) = messages[0]["tool_calls"][0]["function"]["arguments"], messages[1]
        assert answer["role"] == "tool" and answer["content"] == str(arguments["a"] + arguments["b"])
    assert logged(trainer, "tools/call_frequency") == [1.0, 1.0]
    assert min(logged(trainer, "grad_norm")) > 0


def test_rollout_functions_sample_from_the_weights_that_train(mode: str, train: Any) -> None:
    steps: list[int] = []

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = trainer.sample_completions([prompt for prompt in prompts for _ in range(trainer.num_generations)])
        steps.append(trainer.vllm_policy.policy_step)
        return made

    trainer = train(mode, arguments={"rollout_func": rollout})
    assert steps == [0, 1, 2]
    assert_in_step(trainer, [0, 1, 2])
