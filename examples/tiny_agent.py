"""Shared by the agent examples: a small tokenizer with a template for tools, a small model, a warm-up, a report.

Nothing is downloaded. The template writes a call as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and
names each tool with its parameters at the beginning of the prompt.
"""

from __future__ import annotations

import argparse
import json
import re
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.demo.run import plot_rewards

Message = dict[str, Any]
Demonstrator = Callable[[Random], list[Message]]
"""Makes one conversation, from the question to the last answer."""

PAD, EOS = "<pad>", "<end>"
ROLES = ("<user>", "<assistant>", "<tool>")
CALL_PIECES = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": ', "}}")

# What stands in a generation block is what the model is trained to say itself, its end mark included.
TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{% set function = tool.function %}
{{- function.name }}({{ function.parameters.properties | join(', ') }}) {% endfor %}{{ eos_token }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{ '<assistant>' }}{% generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}</tool_call>' }}
        {%- endfor %}{{ eos_token }}{% endgeneration %}
    {%- else %}{{ '<' + message.role + '>' + message.content + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


def make_tokenizer(
    words: Sequence[str], template: str = TEMPLATE, marks: Sequence[str] = (*ROLES, *CALL_PIECES), eos: str = EOS
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each of `words` and of the template's `marks`, and else one a character.

    A turn is then about ten tokens long, and still anything that a tool may answer can be written.
    """
    whole = [PAD, eos, *marks, *words]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*whole, *string.printable, "<unknown>"]))}
    longest_first = sorted(map(re.escape, whole), key=len, reverse=True)
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*longest_first, r"[\s\S]"])), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3-architecture model of about 140,000 parameters, float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        initializer_range=0.1,  # tokens that differ from the start are copied sooner; 0.02 is for wide models
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
        },  # conversations are short: tell near places apart
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def call(name: str, **arguments: Any) -> Message:
    """An assistant's turn that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def say(text: str, role: str = "assistant") -> Message:
    """A turn that is only text."""
    return {"role": role, "content": text}


def make_batch(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[list[Message]], schemas: Sequence[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask`, `labels`, (n, longest) int64: what tools and users say is not labelled (-100)."""
    rendered: Any = tokenizer.apply_chat_template(
        list(conversations), tools=list(schemas), return_dict=True, return_assistant_tokens_mask=True
    )
    rows = zip(rendered["input_ids"], rendered["assistant_masks"])
    tensors = [(torch.tensor(ids), torch.tensor(mask)) for ids, mask in rows]
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in tensors], True, float(tokenizer.pad_token_id))
    own = torch.nn.utils.rnn.pad_sequence([mask for _, mask in tensors], True, 0.0)
    lengths = torch.tensor([len(ids) for ids, _ in tensors])
    attention_mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": ids.masked_fill(own == 0, -100)}


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    demonstrate: Demonstrator,
    schemas: Sequence[dict[str, Any]],
    *,
    num_steps: int,
    seed: int,
    batch_size: int = 48,
    learning_rate: float = 4e-3,
) -> list[float]:
    """Train the model on demonstrations, as sloppy as they are; gives each step's loss in nats a token."""
    rng, losses = Random(seed), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    model.train()
    for _ in tqdm(range(num_steps), desc="warm-up", unit="step", disable=None):
        batch = make_batch(tokenizer, [demonstrate(rng) for _ in range(batch_size)], schemas)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parse(description: str | None, name: str, *, warm_up_steps: int, grpo_steps: int) -> argparse.ArgumentParser:
    """The command line of an example."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seed", type=int, default=0, help="model, tasks and sampling all follow from it (default 0)")
    parser.add_argument("--output_dir", default=f"runs/{name}", help=f"where files are written (default runs/{name})")
    parser.add_argument("--warm_up_steps", type=int, default=warm_up_steps, help="supervised steps")
    parser.add_argument("--grpo_steps", type=int, default=grpo_steps, help="GRPO steps, 128 rows each")
    return parser


def make_config(options: argparse.Namespace, **more: Any) -> GRPOConfig:
    """8 tasks a step and 16 rollouts each; held-out tasks are tried once each, all of them in one batch."""
    settings: dict[str, Any] = {
        "output_dir": options.output_dir,
        "seed": options.seed,
        "max_steps": options.grpo_steps,
        "per_device_train_batch_size": 128,
        "num_generations": 16,
        "per_device_eval_batch_size": 256,
        "num_generations_eval": 1,
        "learning_rate": 6e-4,
        "adam_beta2": 0.98,  # gradients shrink as the task is learned; a long memory would hold the steps back
        "beta": 0.0,
        "logging_steps": 5,
        "log_completions": True,
        "num_completions_to_print": 0,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    return GRPOConfig(**{**settings, **more})


@dataclass(slots=True, frozen=True)
class Measured:
    """A policy on the held-out tasks, one rollout each, sampled at temperature 1."""

    success: float
    """Share of tasks solved."""
    correct_calls: float
    """Share of the tool calls that were right; what that means, the example says."""
    metrics: dict[str, float]
    """All that the trainer measured, by its `eval_` names."""
    transcripts: list[str]
    """The first rollouts, for people."""


def measure(trainer: GRPOTrainer, *, reward: str, wrong_calls: str) -> Measured:
    """Sample the held-out tasks with the policy as it is: a task is solved if the reward of this name is above 0, and
    the metric `wrong_calls` is the share of calls that were wrong."""
    metrics = trainer.evaluate()
    files = (Path(str(trainer.args.output_dir)) / "completions").glob("eval_*.parquet")
    records = pd.read_parquet(max(files, key=lambda path: path.stat().st_mtime_ns))
    shown = [transcript([*_messages(row.prompt), *_messages(row.completion)]) for row in records.head(2).itertuples()]
    correct_calls = 1 - metrics[wrong_calls] if metrics["eval_tools/call_frequency"] else 0.0
    return Measured(float((records[reward] > 0).mean()), correct_calls, metrics, shown)


def _messages(cell: Any) -> Sequence[Message]:
    """A conversation as it was; where a model gave an argument several types, the table holds it as JSON."""
    return json.loads(cell) if isinstance(cell, str) else cell


def transcript(messages: Sequence[Message]) -> str:
    """A conversation in one line."""
    turns: list[str] = []
    for message in messages:
        turn = message["content"] or ""
        # In a table read from disk a column that a row lacks is None, and whole numbers may have become floats.
        for entry in () if message.get("tool_calls") is None else message["tool_calls"]:
            name, arguments = entry["function"]["name"], entry["function"]["arguments"]
            given = {key: value for key, value in arguments.items() if value is not None and value == value}
            values = [
                f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in given.items()
            ]
            turn += f"{name}({', '.join(values)})"
        turns.append(turn)
    return " | ".join(turns)


def run(trainer: GRPOTrainer, measured: Callable[[], Measured], started: float, *, min_calls: float = 0.9) -> int:
    """Measure, train, measure again, report; 0 if success has doubled and more than `min_calls` of calls are right."""
    before = measured()
    print(f"Before GRPO: success {before.success:.1%}, correct calls {before.correct_calls:.1%}\n")
    trainer.train()
    after = measured()
    # Training begins a log of its own, without what was measured before it.
    history, folder = [{**before.metrics, "step": 0}, *trainer.state.log_history], Path(str(trainer.args.output_dir))
    trainer.save_model()
    plot_rewards(history, folder / "rewards.png")
    return report(before, after, folder, time.perf_counter() - started, min_calls=min_calls)


def report(before: Measured, after: Measured, folder: Path, seconds: float, *, min_calls: float = 0.9) -> int:
    """Print before and after; 0 if the claims hold, else 1."""
    print(f"\n{'held-out tasks, one sampled rollout each':44}{'before':>9}{'after':>9}")
    print(f"  {'success':42}{before.success:9.1%}{after.success:9.1%}")
    print(f"  {'correct tool calls':42}{before.correct_calls:9.1%}{after.correct_calls:9.1%}")
    names = [name for name in after.metrics if re.match("eval_(tools|rollouts|rewards)/[^/]", name)]
    for name in names:
        first, second = before.metrics.get(name, float("nan")), after.metrics[name]
        print(f"  {name.removeprefix('eval_'):42}{first:9.3f}{second:9.3f}")
    for name, measured in (("before", before), ("after", after)):
        print(f"\n{name}:\n  " + "\n  ".join(measured.transcripts))
    print(f"\nFiles in {folder}/: model, tokenizer, rewards.png, metrics.jsonl, completions/; {seconds:.0f} s in all")
    held = after.success >= 2 * before.success and after.correct_calls > min_calls
    claim = f"success at least doubles, and more than {100 * min_calls:.0f} % of the calls are correct"
    print(f"{'Met' if held else 'Missed'}: {claim}.")
    return 0 if held else 1
