from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from groupgrad.errors import RewardError
from groupgrad.rewards import RewardRunner
from groupgrad.rewards.models import RewardModel, RewardModelOptions, model_name

WORDS = ["<unk>", "<eos>", "<pad>", "user", "assistant", "sky", "is", "blue", "green", "the", "very", "and", "or"]
TEMPLATE = """{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {{ eos_token }} {% endfor %}
{% if shout %}very{% endif %}"""
TEXTS = ["is blue", "is very very very green and blue", "or", "the sky", "is green or blue and"]


def make_tokenizer(**special):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", chat_template=TEMPLATE, **(special or {"eos_token": "<eos>"})
    )


def make_model(seed=0, **overrides):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        max_position_embeddings=64,
        **overrides,
    )
    return LlamaForSequenceClassification(config).float()


def by_hand(model, ids):
    """The score head on the last token's hidden state, one row and no padding."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
        return model.score(hidden[0, -1])[0].item()


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "hub" / "tiny-rm"
    make_model().save_pretrained(folder)
    make_tokenizer(eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("max_batch_rows", [1, 2, 16])
def test_texts_score_as_one_row_at_a_time(make_rollouts, max_batch_rows):
    model, tokenizer = make_model(), make_tokenizer()
    rollouts = make_rollouts(TEXTS, [{"prompt": "the sky "}] * len(TEXTS))
    table = RewardRunner(model, tokenizer, max_batch_rows=max_batch_rows).score(rollouts)
    expected = [by_hand(model, [WORDS.index(word) for word in ("the sky " + text).split()]) for text in TEXTS]
    assert table.rewards.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert max(expected) - min(expected) > 1e-3
    assert tokenizer.pad_token is None  # the tokenizer given is left as it was
    assert model.config.pad_token_id == WORDS.index("<eos>")


def test_conversations_go_through_the_template(make_rollouts):
    model, tokenizer = make_model(), make_tokenizer(eos_token="<eos>", pad_token="<pad>")
    completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
    rollouts = make_rollouts(completions, [{"prompt": [{"role": "user", "content": "the sky"}]}] * len(TEXTS))
    table = RewardRunner([model], [tokenizer], chat_template_kwargs={"shout": True}).score(rollouts)
    ids = [tokenizer(f"user the sky <eos> assistant {text} <eos> very")["input_ids"] for text in TEXTS]
    words = ["user", "the", "sky", "<eos>", "assistant", "is", "blue", "<eos>", "very"]
    assert ids[0] == [WORDS.index(word) for word in words]
    assert table.rewards.flatten().tolist() == pytest.approx([by_hand(model, row) for row in ids], abs=1e-6)
    assert model.config.pad_token_id == WORDS.index("<pad>")


def test_a_folder_is_loaded_with_one_label_and_without_policy_settings(make_rollouts, saved):
    kwargs = {
        "revision": "policy-branch",
        "quantization_config": object(),
        "attn_implementation": "no_such_attention",
        "device_map": "auto",
        "dtype": "float64",
    }
    given = dict(kwargs)
    functions = [saved + "/", lambda completions: [1.0] * len(completions)]
    runner = RewardRunner(functions, model_init_kwargs=kwargs)
    assert kwargs == given and functions[0] == saved + "/"
    assert runner.names == ["tiny-rm", "<lambda>"]
    model = runner._scorers[0].model  # pyright: ignore[reportAttributeAccessIssue]
    assert model.config.num_labels == 1 and model.dtype == torch.float64 and not model.training
    rollouts = make_rollouts(["is blue", "or"], [{"prompt": "sky "}] * 2)
    expected = [by_hand(model, [WORDS.index(w) for w in f"sky {text}".split()]) for text in ("is blue", "or")]
    assert runner.score(rollouts).rewards[:, 0].tolist() == pytest.approx(expected, abs=1e-9)


def test_the_tokenizer_of_a_model_object_is_found_by_its_name(make_rollouts, saved):
    model = LlamaForSequenceClassification.from_pretrained(saved)
    runner = RewardRunner([model, model], [None, make_tokenizer()])
    assert runner.names == ["tiny-rm", "tiny-rm_2"]
    rewards = runner.score(make_rollouts(TEXTS, [{"prompt": "sky "}] * len(TEXTS))).rewards
    assert rewards[:, 0].tolist() == rewards[:, 1].tolist()


def test_a_model_object_without_a_name_needs_a_tokenizer():
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification.*give it in reward_processing_classes"):
        RewardRunner(make_model())


def test_a_tokenizer_without_padding_and_end_is_refused():
    with pytest.raises(ValueError, match=r"neither a padding nor an end-of-sequence token.*set tokenizer.pad_token"):
        RewardRunner(make_model(), make_tokenizer(bos_token="<eos>"))


def test_a_processor_gives_its_tokenizer(make_rollouts):
    class Processor:
        tokenizer = make_tokenizer()

    model = make_model()
    rollouts = make_rollouts(TEXTS, [{"prompt": "sky "}] * len(TEXTS))
    with_processor = RewardRunner(model, Processor()).score(rollouts).rewards
    assert with_processor.tolist() == RewardRunner(model, make_tokenizer()).score(rollouts).rewards.tolist()


def test_scoring_runs_in_evaluation_mode_without_gradient(make_rollouts):
    model = make_model(attention_dropout=0.9)
    runner = RewardRunner(model, make_tokenizer())
    model.train()
    rollouts = make_rollouts(TEXTS, [{"prompt": "sky "}] * len(TEXTS))
    first, second = runner.score(rollouts).rewards, runner.score(rollouts).rewards
    assert first.tolist() == second.tolist() and not first.requires_grad and not model.training


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_names_its_row(make_rollouts, bad):
    model = make_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[WORDS.index("green")] = bad
    rollouts = make_rollouts(["is blue", "is green"], [{"prompt": "sky "}] * 2)
    with pytest.raises(
        RewardError, match=r"'LlamaForSequenceClassification', step 5: it gave nan for row 1 .*'is green'"
    ):
        RewardRunner(model, make_tokenizer()).score(rollouts, step=5)


def test_a_failing_model_is_named(make_rollouts):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    rollouts = make_rollouts(
        [[{"role": "assistant", "content": "x"}]], [{"prompt": [{"role": "user", "content": "q"}]}]
    )
    with pytest.raises(
        RewardError, match=r"'LlamaForSequenceClassification' failed at step 0 on a batch of 1 rows"
    ) as e:
        RewardRunner(make_model(), tokenizer).score(rollouts)
    assert e.value.__cause__ is not None


def test_a_model_that_scores_tokens_is_refused(make_rollouts):
    class Tagger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, attention_mask):
            from types import SimpleNamespace

            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 3))

    with pytest.raises(RewardError, match=r"'Tagger'.*logits have shape \(1, 2, 3\) for 1 rows"):
        RewardRunner(Tagger(), make_tokenizer()).score(make_rollouts(["is"], [{"prompt": "sky "}]))


def test_a_text_beyond_the_models_length_keeps_its_end(make_rollouts, caplog):
    model = make_model()
    runner = RewardRunner(model, make_tokenizer())
    words = ["very"] * 70 + ["is", "blue"]
    rewards = runner.score(make_rollouts([" ".join(words)], [{"prompt": "sky "}])).rewards
    expected = by_hand(model, [WORDS.index(word) for word in words[-64:]])
    assert rewards.item() == pytest.approx(expected, abs=1e-6)
    assert "reads at most 64 tokens" in caplog.text


def test_names_of_models():
    assert model_name("org/reward-model") == "reward-model"
    assert model_name("./a/b/") == "b"
    assert model_name(torch.nn.Linear(1, 1)) == "Linear"


def test_a_reward_model_stays_on_its_devices():
    model = make_model()
    model.hf_device_map = {"": "cpu"}  # pyright: ignore[reportAttributeAccessIssue]
    RewardModel(model, make_tokenizer(), RewardModelOptions(device="meta"))
    assert next(model.parameters()).device.type == "cpu"
