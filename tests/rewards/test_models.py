from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import make_scorer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.integrations import deepspeed as hf_deepspeed

from groupgrad.errors import RewardError
from groupgrad.rewards.model_loading import RewardModelOptions, hub_kwargs, max_input_tokens
from groupgrad.rewards.models import RewardModel
from groupgrad.rewards.reward_runner import RewardRunner

WORDS = ["<unk>", "<eos>", "<pad>", "user", "assistant", "sky", "is", "blue", "green", "the", "very", "and", "or"]
TEMPLATE = """{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {{ eos_token }} {% endfor %}
{% if shout %}very{% endif %}"""
SKY = [{"prompt": "sky "}]
TEXTS = ["is blue", "is very very very green and blue", "or", "the sky", "is green or blue and"]


def make_tokenizer(**special):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", chat_template=TEMPLATE, **(special or {"eos_token": "<eos>"})
    )


def make_model(**overrides):
    return make_scorer(
        **{
            "vocab_size": len(WORDS),
            "max_position_embeddings": 64,
            "pad_token_id": None,
            "initializer_range": 0.02,
            **overrides,
        }
    )


def conversations(make_rollouts, texts=TEXTS, question="the sky"):
    """Rollouts whose answers to a question are these texts."""
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return make_rollouts(completions, [{"prompt": [{"role": "user", "content": question}]}] * len(texts))


def by_hand(model, ids):
    """Applies the score head to the last token's hidden state of one row without padding."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
        return model.score(hidden[0, -1])[0].item()


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "hub" / "tiny-rm"
    make_model().save_pretrained(folder)
    make_tokenizer(eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("batch_tokens", [1, 12])
def test_texts_score_as_one_row_at_a_time(make_rollouts, batch_tokens):
    model, tokenizer = make_model(), make_tokenizer()
    rollouts = make_rollouts(TEXTS, [{"prompt": "the sky "}] * len(TEXTS))
    table = RewardRunner(model, tokenizer, models=RewardModelOptions(batch_tokens=batch_tokens)).score(rollouts)
    expected = [by_hand(model, [WORDS.index(word) for word in ("the sky " + text).split()]) for text in TEXTS]
    assert table.rewards.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert max(expected) - min(expected) > 1e-3
    assert (tokenizer.pad_token, model.config.pad_token_id) == (None, None), "neither is changed"


@pytest.mark.parametrize("special", [{"eos_token": "<eos>"}, {"eos_token": "<eos>", "pad_token": "<eos>"}])
@pytest.mark.parametrize("own_pad", [None, WORDS.index("<eos>")])
def test_a_row_that_ends_with_the_padding_token_is_scored_at_its_end(make_rollouts, special, own_pad):
    """The template ends each turn with the end-of-sequence token, which pads too, in the tokenizer or the model."""
    model, tokenizer = make_model(pad_token_id=own_pad), make_tokenizer(**special)
    runner = RewardRunner(model, tokenizer)
    ids = [tokenizer(f"user the sky <eos> assistant {text} <eos>")["input_ids"] for text in TEXTS]
    expected = [by_hand(model, row) for row in ids]
    assert runner.score(conversations(make_rollouts)).rewards.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    early = [by_hand(model, row[:-1]) for row in ids]
    assert min(abs(one - other) for one, other in zip(expected, early)) > 1e-3
    assert model.config.pad_token_id == own_pad


@pytest.mark.parametrize("content", ["the sky", [{"type": "text", "text": "the "}, {"type": "text", "text": "sky"}]])
def test_conversations_go_through_the_template(make_rollouts, content):
    model, tokenizer = make_model(), make_tokenizer(eos_token="<eos>", pad_token="<pad>")
    runner = RewardRunner([model], [tokenizer], models=RewardModelOptions(chat_template_kwargs={"shout": True}))
    table = runner.score(conversations(make_rollouts, question=content))
    ids = [tokenizer(f"user the sky <eos> assistant {text} <eos> very")["input_ids"] for text in TEXTS]
    words = ["user", "the", "sky", "<eos>", "assistant", "is", "blue", "<eos>", "very"]
    assert ids[0] == [WORDS.index(word) for word in words]
    assert table.rewards.flatten().tolist() == pytest.approx([by_hand(model, row) for row in ids], abs=1e-6)


@pytest.mark.parametrize("is_conversation", [True, False])
def test_a_completion_cannot_end_its_turn_for_the_reward_model(make_rollouts, is_conversation):
    model, tokenizer = make_model(), make_tokenizer(eos_token="<eos>", pad_token="<pad>")
    text, prompt = "is <eos> blue", [{"role": "user", "content": "the sky"}] if is_conversation else "the sky "
    completion = [{"role": "assistant", "content": text}] if is_conversation else text
    table = RewardRunner([model], [tokenizer]).score(make_rollouts([completion], [{"prompt": prompt}]))
    answer = ["is", "<unk>", "<unk>", "<unk>", "blue"]  # the vocabulary has no "<", "eos" and ">"
    before, behind = (
        (["user", "the", "sky", "<eos>", "assistant"], ["<eos>"]) if is_conversation else (["the", "sky"], [])
    )
    ids = [WORDS.index(word) for word in [*before, *answer, *behind]]
    assert table.rewards.item() == pytest.approx(by_hand(model, ids), abs=1e-6)


def test_a_folder_is_loaded_with_one_label_and_options_of_its_own(make_rollouts, saved):
    kwargs = {"dtype": "float64", "attn_implementation": "eager"}
    original = dict(kwargs)
    functions = [saved + "/", lambda completions: [1.0] * len(completions)]
    runner = RewardRunner(functions, models=RewardModelOptions(init_kwargs=kwargs))
    assert kwargs == original and functions[0] == saved + "/" and len(functions) == 2
    assert runner.names == ["tiny-rm", "<lambda>"]
    (scorer,) = runner.models
    model: Any = scorer.model
    assert model.config.num_labels == 1 and model.dtype == torch.float64 and not model.training
    assert model.config._attn_implementation == "eager"
    rollouts = make_rollouts(["is blue", "or"], SKY * 2)
    expected = [by_hand(model, [WORDS.index(w) for w in f"sky {text}".split()]) for text in ("is blue", "or")]
    assert runner.score(rollouts).rewards[:, 0].tolist() == pytest.approx(expected, abs=1e-9)


def test_a_reward_model_is_not_sharded_under_zero_3(saved):
    """Ranks make different numbers of forward passes, so no pass can gather weights from other ranks."""

    class Sharded:
        config: Any = None

        def is_zero3(self) -> bool:
            return True

    sharded = Sharded()  # transformers keeps only a weak reference
    hf_deepspeed.set_hf_deepspeed_config(sharded)
    try:
        (scorer,) = RewardRunner(saved).models
        assert hf_deepspeed.is_deepspeed_zero3_enabled()
    finally:
        hf_deepspeed.unset_hf_deepspeed_config()
    assert [p.shape for p in scorer.model.parameters()] == [p.shape for p in make_model().parameters()]


def test_only_download_options_are_shared_with_the_policy(tmp_path):
    make_model().bfloat16().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model: Any = RewardRunner(str(tmp_path)).models[0].model
    assert model.dtype == torch.bfloat16  # as it was saved
    policy = {"dtype": "bfloat16", "revision": "main", "token": "t", "device_map": "auto", "cache_dir": "/c"}
    assert hub_kwargs(policy) == {"cache_dir": "/c", "token": "t"}


def test_a_checkpoint_without_a_score_head_is_refused(tmp_path):
    """transformers itself initializes the head at random and continues."""
    LlamaForCausalLM(make_model().config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks score.weight, so its rewards would be random; give a sequence-class"):
        RewardRunner(str(tmp_path))


def test_a_checkpoint_with_several_labels_is_refused(tmp_path):
    make_model(num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        RewardRunner(str(tmp_path))
    with pytest.raises(ValueError, match=r"reward_model_init_kwargs has num_labels=3"):
        RewardRunner(str(tmp_path), models=RewardModelOptions(init_kwargs={"num_labels": 3}))


def test_the_tokenizer_of_a_model_object_is_found_by_its_name(make_rollouts, saved):
    model = LlamaForSequenceClassification.from_pretrained(saved)
    runner = RewardRunner([model, model], [None, make_tokenizer()])
    assert runner.names == ["tiny-rm", "tiny-rm_2"]
    rewards = runner.score(make_rollouts(TEXTS, SKY * len(TEXTS))).rewards
    assert rewards[:, 0].tolist() == rewards[:, 1].tolist()


def test_scoring_runs_in_evaluation_mode_without_gradient(make_rollouts):
    model = make_model(attention_dropout=0.9)
    runner = RewardRunner(model, make_tokenizer())
    model.train()
    rollouts = make_rollouts(TEXTS, SKY * len(TEXTS))
    first, second = runner.score(rollouts).rewards, runner.score(rollouts).rewards
    assert first.tolist() == second.tolist() and not first.requires_grad and not model.training


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_names_its_row(make_rollouts, bad):
    model = make_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[WORDS.index("green")] = bad
    rollouts = make_rollouts(["is blue", "is green"], SKY * 2)
    with pytest.raises(
        RewardError, match=r"'LlamaForSequenceClassification', step 5: it gave nan for row 1 .*'is green'"
    ):
        RewardRunner(model, make_tokenizer()).score(rollouts, step=5)


def test_the_row_that_a_template_rejects_is_named(make_rollouts):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'green' %}{{ raise_exception('not green') }}{% endif %}"
        "{{ m['content'] }} {% endfor %}"
    )
    rollouts = conversations(make_rollouts, ["blue", "green"])
    with pytest.raises(
        RewardError, match=r"'LlamaForSequenceClassification' failed at step 4 on row 1 \(prompt 'user: the sky'"
    ) as error:
        RewardRunner(make_model(), tokenizer).score(rollouts, step=4)
    assert error.value.__cause__ is not None


def test_a_processors_own_template_goes_first(make_rollouts):
    class Processor:
        tokenizer = make_tokenizer()
        chat_template = "any"

        def apply_chat_template(self, messages, tokenize):
            return " ".join(["very", *(m["content"] for m in messages)])

    model = make_model()
    reward = RewardRunner(model, Processor()).score(conversations(make_rollouts, ["blue"], "sky")).rewards.item()
    assert reward == pytest.approx(by_hand(model, [WORDS.index(word) for word in ("very", "sky", "blue")]), abs=1e-6)


class Tagger(torch.nn.Module):
    """A model that scores each token."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 3))


def nan_model():
    model = make_model()
    with torch.no_grad():
        model.score.weight.fill_(math.nan)
    return model


def placed_model():
    model = make_model()
    model.hf_device_map = {"": "cpu"}  # pyright: ignore
    return model


@pytest.mark.parametrize(
    ("model", "tokenizer", "options", "message"),
    [
        (Tagger, make_tokenizer, {}, r"'Tagger' cannot score a text: .*logits have shape \(1, 1, 3\) for 1 rows"),
        (lambda: make_model(num_labels=3), make_tokenizer, {}, r"logits have shape \(1, 3\) for 1 rows.*num_labels=1"),
        (make_model, lambda: None, {}, r"LlamaForSequenceClassification.*give it in reward_processing_classes"),
        (
            make_model,
            lambda: make_tokenizer(bos_token="<eos>"),
            {},
            r"neither a padding nor an end-of-sequence token.*set tokenizer.pad_token",
        ),
        (nan_model, make_tokenizer, {}, r"gives nan for the text 'A'.*wider dtype"),
        (placed_model, make_tokenizer, {"offload": True}, r"reward_model_offload=True.*stays where it is"),
    ],
)
def test_a_model_that_cannot_score_is_refused_at_once(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        RewardRunner(model(), tokenizer(), models=RewardModelOptions(**options))


def test_a_text_beyond_the_models_length_is_truncated_with_a_warning(make_rollouts, caplog):
    model = make_model()
    runner = RewardRunner(model, make_tokenizer())
    words = ["very"] * 70 + ["is", "blue"]
    rollouts = make_rollouts([" ".join(words), "or"], SKY * 2)
    table = runner.score(rollouts)
    runner.score(rollouts)
    expected = by_hand(model, [WORDS.index(word) for word in words[-64:]])
    assert table.rewards[0].item() == pytest.approx(expected, abs=1e-6)
    assert table.metrics["rewards/LlamaForSequenceClassification/truncated"].read() == 0.5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "reads at most 64 tokens; of longer texts it sees the end only, as of row 0" in messages[0]
    assert "which has 73" in messages[0]


def test_learned_positions_start_after_the_padding_token():
    """RoBERTa's table of 20 rows has 18 positions; the rows up to the padding token's are unused."""
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=13, max_position_embeddings=20, pad_token_id=1, **{**sizes, "num_labels": 1})
    model = RobertaForSequenceClassification(config).eval()
    assert max_input_tokens(model) == 18
    model(input_ids=torch.full((1, 18), 5))
    with pytest.raises((RuntimeError, IndexError)):
        model(input_ids=torch.full((1, 19), 5))
    assert max_input_tokens(make_model()) == 64
    assert max_input_tokens(torch.nn.Linear(1, 1)) is None


def test_forward_passes_are_bounded_by_tokens(make_rollouts):
    """Rows have 2, 3, 3, 4 and 8 tokens; a pass reads its number of rows times their longest."""
    model = make_model()
    runner = RewardRunner(model, make_tokenizer(), models=RewardModelOptions(batch_tokens=9))
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda m, a, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    texts = ["is very very very very very green", "or", "the sky", "is blue", "is the sky"]
    runner.score(make_rollouts(texts, SKY * 5))
    assert shapes == [(3, 3), (1, 4), (1, 8)]


def test_a_pass_that_runs_out_of_memory_is_made_in_parts(make_rollouts):
    model = make_model()
    runner = RewardRunner(model, make_tokenizer())
    rollouts = make_rollouts(TEXTS, SKY * len(TEXTS))
    expected = runner.score(rollouts).rewards

    def fail(_module: Any, _args: Any, kwargs: Any) -> None:
        if len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("out of memory")

    handle = model.register_forward_pre_hook(fail, with_kwargs=True)
    torch.testing.assert_close(runner.score(rollouts).rewards, expected, atol=1e-6, rtol=0)
    handle.remove()
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(RewardError, match=r"OutOfMemoryError"):
        runner.score(rollouts)


def test_offloaded_weights_are_on_the_device_only_while_scoring(make_rollouts):
    """Host tensors stay the same objects, nothing is copied back, and buffers created in between are kept.

    The device is the host itself: its copies have other addresses.
    """
    model = make_model()
    rollouts = make_rollouts(TEXTS, SKY * len(TEXTS))
    expected = RewardRunner(model, make_tokenizer()).score(rollouts).rewards
    host = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    on_device: list[dict[str, int]] = []
    handle = model.register_forward_hook(
        lambda *_: on_device.append({name: tensor.data_ptr() for name, tensor in model.state_dict().items()})
    )
    runner = RewardRunner(model, make_tokenizer(), models=RewardModelOptions(offload=True))
    assert runner.score(rollouts).rewards.tolist() == expected.tolist()
    assert len(on_device) == 2  # the test text and the rows
    assert all(pointer != host[name] for pointers in on_device for name, pointer in pointers.items())
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == host
    handle.remove()
    model.register_forward_hook(lambda *_: model.register_buffer("made", torch.ones(1)) or 1 / 0)
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        runner.score(rollouts)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items() if name in host} == host


def test_the_models_padding_token_precedes_the_end_of_sequence():
    model, seen = make_model(pad_token_id=WORDS.index("or")), []
    model.register_forward_pre_hook(
        lambda module, _, given: seen.append((given["input_ids"][0, -1].item(), module.config.pad_token_id)),
        with_kwargs=True,
    )
    rows = [[WORDS.index("is")], [WORDS.index("the"), WORDS.index("sky")]]
    for tokenizer, pad in ((make_tokenizer(), "or"), (make_tokenizer(eos_token="<eos>", pad_token="<pad>"), "<pad>")):
        RewardModel(model, tokenizer, RewardModelOptions())._forward(rows)
        assert seen[-1] == (WORDS.index(pad), WORDS.index(pad))
        assert model.config.pad_token_id == WORDS.index("or"), "as the user has set it"


def test_a_placed_model_is_not_moved():
    model = placed_model()
    RewardModel(model, make_tokenizer(), RewardModelOptions(device="meta"))
    assert next(model.parameters()).device.type == "cpu"
