"""A hybrid model that learns to use a calculator: `python examples/hybrid.py`, offline, minutes on two cores.

The model has the architecture of Qwen3.5: in its first layer a recurrent state, updated by the gated delta rule, stands
in the place of keys and values; its second one is attention. It is made on the spot, with random weights. Its chat
template writes calls as Qwen3.5's does, a tag for the function and one for each parameter. The task is the demo's,
`3+5+7+2=`, with a tool that adds two numbers; the way to a right answer is three calls, each with the result of the one
before.

1. Warm-up: demonstrations by careless pupils show what a call looks like. Half of them guess, many go wrong.
2. GRPO with `tools=[add]`; the reward looks only at the final answer. Nothing is set because the model is a hybrid.
3. Held-out problems, before and after. A call is correct if its result is the next partial sum.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any

# Threads that spin while they wait slow a run down when other processes use the same cores. OpenMP reads this when
# PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import get_json_schema
from transformers.utils import logging as transformers_logging

from agent_calculator import answer_reward
from groupgrad import GRPOTrainer
from groupgrad.apps.demo.task import Problem, make_splits
from tiny_agent import Message, call, make_config, make_tokenizer, measure, parse, run, say, warm_up


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    return a + b


EOS = "<|im_end|>"
MARKS = (
    *("<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n", f"{EOS}\n", "<tools>\n", "\n</tools>"),
    *("<tool_call>\n<function=", ">\n", "<parameter=", "\n</parameter>\n", "</function>\n</tool_call>"),
    *("<tool_response>\n", "\n</tool_response>"),
)
"""Strings of the template that are one token each, so that a call is about twelve tokens."""
WORDS = ("add", "<parameter=a>\n", "<parameter=b>\n")

# What stands in a generation block is what the model is trained to say itself, its end mark included.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>\\n' }}{% for tool in tools %}{% set function = tool.function %}
{{- function.name }}({{ function.parameters.properties | join(', ') }}){% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
            {%- endfor %}{{ '</function>\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

HABITS = {"careful": 0.20, "wrong number": 0.20, "broken call": 0.10, "guess": 0.50}
"""Share of each way of answering among the demonstrations."""


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3_5ForCausalLM:
    """An untrained model of the Qwen3.5 architecture, float32: a layer of the gated delta rule, one of attention."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        initializer_range=0.1,  # tokens that differ from the start are copied sooner; 0.02 is for wide models
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3_5ForCausalLM(config)


def results(problem: Problem) -> list[int]:
    """The calculator's results, call by call; the last one is the answer."""
    return list(accumulate(problem.terms))[1:]


def row(problem: Problem) -> dict[str, Any]:
    """A problem as a data-set row; `results` reaches the reward function."""
    return {"prompt": [say(problem.prompt, "user")], "results": results(problem)}


def demonstrate(problem: Problem, habit: str, rng: Random) -> list[Message]:
    """The answers of a pupil of this habit; from a wrong number on, everything follows from it."""
    messages = [say(problem.prompt, "user")]
    if habit == "guess":
        return [*messages, say(str(problem.solution + rng.choice((-3, -2, -1, 1, 2, 3))))]
    value, slip_at = problem.terms[0], rng.randrange(1, len(problem.terms))
    for place, term in enumerate(problem.terms[1:], 1):
        if place == slip_at and habit == "wrong number":
            term = rng.choice([digit for digit in range(1, 10) if digit != term])
        if place == slip_at and habit == "broken call":
            # Without the second parameter's end no parser reads it; the tool's reply would say so.
            pieces = f"<tool_call>\n<function=add>\n<parameter=a>\n{value}\n</parameter>\n<parameter=b>\n{term}"
            return [*messages, say(pieces + "</function>\n</tool_call>")]
        messages.append(call("add", a=value, b=term))
        value += term
        messages.append(say(str(value), "tool"))
    return [*messages, say(str(value))]


def main(arguments: list[str] | None = None) -> int:
    """Run the example; 0 if what it claims was met."""
    started = time.perf_counter()
    options = parse(__doc__, "hybrid", warm_up_steps=300, grpo_steps=50).parse_args(arguments)
    transformers_logging.disable_progress_bar()
    splits = make_splits(options.seed, num_held_out=256)
    tokenizer = make_tokenizer(WORDS, TEMPLATE, MARKS, EOS)
    model = make_model(tokenizer, options.seed)
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters: {', '.join(model.config.layer_types)}")

    def demonstrator(rng: Random) -> list[Message]:
        habit = rng.choices(list(HABITS), list(HABITS.values()))[0]
        return demonstrate(rng.choice(splits.warm_up), habit, rng)

    warm_up(model, tokenizer, demonstrator, [get_json_schema(add)], num_steps=options.warm_up_steps, seed=options.seed)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=answer_reward,
        args=make_config(options, max_completion_length=128, learning_rate=4e-4, max_tool_calling_iterations=4),
        train_dataset=Dataset.from_list([row(problem) for problem in splits.grpo]),
        eval_dataset=Dataset.from_list([row(problem) for problem in splits.held_out]),
        processing_class=tokenizer,
        tools=[add],
    )
    engine, layout = trainer.execution.engine_choice, trainer.execution.layout_report
    print(f"sampled by the {engine.name} engine, scored in the {layout.layout} layout")
    measured = partial(measure, trainer, reward="answer_reward", wrong_calls="eval_calls/wrong")
    return run(trainer, measured, started, min_calls=0.8)


if __name__ == "__main__":
    sys.exit(main())
