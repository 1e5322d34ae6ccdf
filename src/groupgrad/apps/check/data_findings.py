"""Checks a trainer's data, batches and prompts without sampling."""

from __future__ import annotations

from typing import Any

from groupgrad.chat import ChatFormat
from groupgrad.models.load import inner_tokenizer
from groupgrad.run_folder.advice import Finding
from groupgrad.trainer import dataset_checks, run_summary

MEASURED_PROMPTS = 1024
"""Prompts whose lengths are measured."""


def data_findings(trainer: Any) -> list[Finding]:
    """Returns what a trainer's data set, batch sizes, tokenizer and precision show, as a run uses them."""
    precision = run_summary.half_precision(trainer)
    return [
        _columns(trainer),
        Finding("data", run_summary.data_in_words(trainer)),
        _prompts(trainer),
        _template(trainer),
        Finding("batch", run_summary.batch_in_words(trainer.plan)),
        Finding("steps", run_summary.steps_in_words(trainer)),
        *([] if precision is None else [precision]),
    ]


def _columns(trainer: Any) -> Finding:
    columns = dataset_checks.column_names(trainer.train_dataset)
    used = run_summary.columns_in_words(trainer, columns)
    return Finding("columns", f"the data set has {', '.join(columns)}; {used}")


def _prompts(trainer: Any) -> Finding:
    lengths = run_summary.prompt_lengths(trainer, MEASURED_PROMPTS)
    context, wanted = trainer.prompt_maker.max_context, trainer.components.sampling.max_new_tokens
    # A prompt that was not measured has one token at least.
    cut = [context is not None and length + wanted > context for length in lengths.lengths or [1]]
    if context is None or not any(cut):
        return Finding("prompts", str(lengths))
    share = f"{100 * sum(cut) / len(cut):.0f} % of them leave no room" if lengths.lengths else "there is no room"
    if wanted >= context:
        mend = f"Lower max_completion_length below {context:,}"
    else:
        mend = "Filter out long prompts, lower max_completion_length"
    return Finding(
        "prompts",
        f"{lengths}; {share} for a completion of {wanted:,} tokens (max_completion_length) in the context of "
        f"{context:,} positions that prompt and completion have together.",
        "warning",
        f"{mend}, or raise vllm_max_model_length if that set the limit.",
    )


def _template(trainer: Any) -> Finding:
    """A finding about the chat template and the tokens that end a completion."""
    tokenizer = inner_tokenizer(trainer.prompt_maker.tokenizer)
    text, first = run_summary.ending_in_words(trainer), run_summary.first_prompt(trainer.train_dataset)
    is_rendered = isinstance(first, str) and trainer.prompt_maker.outside_text.is_rendered(first)
    if isinstance(first, str) and getattr(tokenizer, "chat_template", None) and not is_rendered:
        return Finding(
            "template",
            f"{text}. The tokenizer has a chat template, which texts do not go through, so a model tuned for chats "
            "sees prompts of a kind that it does not know.",
            "warning",
            "Make prompts lists of messages (with groupgrad train: conversational=True), unless that is meant.",
        )
    known = trainer.components.sampling.eos_ids
    turn_ends = [] if first is None or isinstance(first, str) else _turn_ends(tokenizer)
    if turn_ends and not set(turn_ends) & set(known):
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(turn_ends)))
        return Finding(
            "template",
            f"{text}, but the chat template ends turns with {names}, so an answer goes on after its turn.",
            "warning",
            f"Add {turn_ends} to eos_token_id of the model's generation_config.json, or set the tokenizer's eos_token.",
        )
    return Finding("template", text)


def _turn_ends(tokenizer: Any) -> list[int]:
    """Returns the tokens with which the chat template ends a turn; none if they cannot be told."""
    try:
        # Templates without tools are read too, since no call is parsed here.
        return list(ChatFormat(tokenizer, schemas=[], response_parser=lambda *_: {}).end_ids)
    except ValueError:
        return []
