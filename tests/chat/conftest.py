"""Chat templates in the tool format of each family, written for these tests, and byte-level tokenizers for them."""

# Lines of templates stay long: their line breaks are part of the rendered text.
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast


@dataclass(slots=True, frozen=True)
class Family:
    """A chat template and the properties that its format must have."""

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    """Tokens that end a turn; the first one ends a turn with calls."""
    reply: str
    """Text between a finished turn with one call of `look_up`, whose result is OK, and the next turn."""
    name: str
    """Part of the format's `name`."""
    several: bool = True
    """A message may hold several calls."""
    added: tuple[str, ...] = ()
    """Added tokens that are not special: decoding keeps them when it skips special tokens."""
    content: bool = True
    """The template renders the content of a message with calls."""
    keeps_history: bool = True
    """The template renders a turn the same whatever follows it."""


_CHATML = ("<|im_start|>", "<|im_end|>")
_CHATML_REPLY = "\n<|im_start|>user\n<tool_response>\nOK\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
_CHATML_HEAD = """
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for t in tools %}{{ '\\n' + t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == 'assistant' %}"""
_CHATML_TAIL = """{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_JSON_CALLS = """
{%- for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}"""

CHATML_JSON = _CHATML_HEAD + "{{ '<|im_start|>assistant\\n' + m.content }}" + _JSON_CALLS + _CHATML_TAIL

# As in Qwen3: a think block stands only in a last turn and in turns with reasoning.
CHATML_THINK = (
    _CHATML_HEAD
    + """{{ '<|im_start|>assistant\\n' }}
{%- if loop.last or m.reasoning_content %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}"""
    + _JSON_CALLS
    + _CHATML_TAIL
)

CHATML_XML = (
    _CHATML_HEAD
    + """{{ '<|im_start|>assistant\\n<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{% if m.content and loop.first %}{{ '\\n\\n' }}{% elif not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter=' + k + '>\\n' + (v | tojson if v is mapping or (v is sequence and v is not string) else v | string) + '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}"""
    + _CHATML_TAIL.replace("assistant\\n'", "assistant\\n<think>\\n'")
)

PAIRS = """[gMASK]<sop>{% if tools %}{{ '<|system|>\\n' + tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}
{%- elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{ '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name + '\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\\n' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

BARE = """<|begin_of_text|>{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' + tools | tojson + '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_MISTRAL_HEAD = """<s>{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- for c in m.tool_calls or [] %}{% if c.id is not string or c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}{% endfor %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}"""
MISTRAL_LIST = (
    _MISTRAL_HEAD
    + """{{ '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + ('' if loop.last else ', ') }}{% endfor %}{{ ']</s>' }}
{%- else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"""
)
MISTRAL_ARGS = (
    _MISTRAL_HEAD
    + """{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ m.content }}{% for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}{{ '</s>' }}
{%- endif %}{% endfor %}"""
)

CHANNELS = """{% if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- set last = namespace(name='') %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- elif m.tool_calls %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{%- set f = m.tool_calls[0].function %}{% set last.name = f.name %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' + f.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

BRACES = """<bos>
{%- macro put(v) %}
{%- if v is string %}{{ '<|"|>' + v + '<|"|>' }}{% elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is mapping %}{{ '{' }}{% for k, x in v | dictsort %}{{ k + ':' + put(x) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}
{%- elif v is sequence %}{{ '[' }}{% for x in v %}{{ put(x) }}{{ '' if loop.last else ',' }}{% endfor %}{{ ']' }}
{%- else %}{{ v }}{% endif %}{% endmacro %}
{%- if tools %}{{ '<|turn>system\\n' + tools | tojson + '<turn|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ 'response:' + m.name + '{value:' + put(m.content) + '}<tool_response|>' }}
{%- if loop.nextitem is defined and loop.nextitem.role == 'tool' %}{{ '<|tool_response>' }}{% endif %}
{%- else %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + put(c.function.arguments) + '<tool_call|>' }}{% endfor %}
{{- '<|tool_response>' if m.tool_calls else '<turn|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\\n' }}{% endif %}"""

PYTHON = (
    _CHATML_HEAD.replace("<|im_start|>user'", "<|im_start|>tool'")
    + """{{ '<|im_start|>assistant\\n' + m.content }}
{%- if m.tool_calls %}{{ '<|tool_call_start|>[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}
{%- for k, v in c.function.arguments | items %}{{ k + '=' + (v | tojson if v is not boolean and v is not none else v | string) + ('' if loop.last else ', ') }}{% endfor %}
{{- ')' + ('' if loop.last else ', ') }}{% endfor %}{{ ']<|tool_call_end|>' }}{% endif %}"""
    + _CHATML_TAIL
)

FENCED = """<s>{{ tools | tojson if tools }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|output|>' + m.content + '<|/output|>' }}
{%- else %}{{ '<|Assistant|>' + m.content }}
{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}
{{- '</s>' }}{% endif %}{% endfor %}{{ '<|Assistant|>' if add_generation_prompt }}"""

_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_MISTRAL = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
)
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
_GEMMA = (
    "<bos>",
    "<|turn>",
    "<turn|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)

FAMILIES: dict[str, Family] = {
    "json": Family(CHATML_JSON, _CHATML, ("<|im_end|>",), _CHATML_REPLY, "JSON objects in <tool_call> tags"),
    "json, special tags": Family(
        CHATML_JSON, (*_CHATML, "<tool_call>", "</tool_call>"), ("<|im_end|>",), _CHATML_REPLY, "JSON objects"
    ),
    "json, thinking": Family(
        CHATML_THINK,
        _CHATML,
        ("<|im_end|>",),
        _CHATML_REPLY,
        "JSON objects",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        keeps_history=False,
    ),
    "xml": Family(CHATML_XML, _CHATML, ("<|im_end|>",), _CHATML_REPLY + "<think>\n", "keys and values (<parameter="),
    "pairs": Family(
        PAIRS,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|observation|>", "<|user|>"),
        "\n<tool_response>\nOK\n</tool_response><|assistant|>",
        "keys and values (<arg_key>",
        added=("<tool_call>", "</tool_call>"),
    ),
    "bare": Family(
        BARE,
        _LLAMA,
        ("<|eot_id|>",),
        '<|start_header_id|>ipython<|end_header_id|>\n\n"OK"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "bare JSON",
        several=False,
        content=False,
    ),
    "list": Family(
        MISTRAL_LIST,
        _MISTRAL,
        ("</s>",),
        '[TOOL_RESULTS]{"content": OK, "call_id": "abcdefgh1"}[/TOOL_RESULTS]',
        "JSON objects after [TOOL_CALLS]",
        content=False,
    ),
    "args": Family(
        MISTRAL_ARGS,
        (*_MISTRAL, "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]"),
        ("</s>",),
        "[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]OK[/TOOL_RESULTS]",
        "a name and JSON arguments after [TOOL_CALLS]",
    ),
    "channels": Family(
        CHANNELS,
        _HARMONY,
        ("<|call|>", "<|return|>"),
        '<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"OK"<|end|><|start|>assistant',
        "channels",
        several=False,
        content=False,
    ),
    "braces": Family(
        BRACES,
        _GEMMA,
        ("<|tool_response>", "<turn|>"),
        'response:look_up{value:<|"|>OK<|"|>}<tool_response|>',
        "name{key:value} after <|tool_call>call:",
    ),
    "python": Family(
        PYTHON,
        (*_CHATML, "<|tool_call_start|>", "<|tool_call_end|>"),
        ("<|im_end|>",),
        _CHATML_REPLY.replace("<|im_start|>user", "<|im_start|>tool"),
        "a list of Python calls",
    ),
    "fenced": Family(
        FENCED,
        (
            "<s>",
            "</s>",
            "<|User|>",
            "<|Assistant|>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        ("</s>",),
        "<|output|>OK<|/output|><|Assistant|>",
        "a name and JSON arguments after <｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    ),
}


def byte_tokenizer(template: str, special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> Any:
    """Builds a tokenizer with a token per byte and the given special and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(text, special=False) for text in added])
    inner.add_special_tokens([AddedToken(text, special=True) for text in (*special, "<|bos|>", "<|eos|>", "<|pad|>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(special),
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    """Each family in turn."""
    return FAMILIES[request.param]


@pytest.fixture(scope="session")
def qwen3(shared: Path) -> Any:
    """The real tokenizer of Qwen3."""
    return AutoTokenizer.from_pretrained(shared / "data" / "qwen3-tokenizer")


@pytest.fixture(scope="session")
def families() -> dict[str, Family]:
    """All families by name."""
    return FAMILIES


@pytest.fixture(name="byte_tokenizer", scope="session")
def _byte_tokenizer() -> Callable[..., Any]:
    return byte_tokenizer
