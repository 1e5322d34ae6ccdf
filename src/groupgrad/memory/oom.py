"""Out-of-memory errors: detection, cleanup, and scoring of a batch in parts."""

from __future__ import annotations

import gc
import logging
import re
import traceback
from collections.abc import Callable
from functools import cache

import torch

from groupgrad.batch import Batch, TokenScores

logger = logging.getLogger(__name__)

_MESSAGES = re.compile(
    r"out[ _]of[ _](device[ _]|host[ _])?memory"
    r"|can't allocate memory|cannot allocate memory|not enough memory|_alloc_failed"
    # oneDNN allocates when it creates and runs kernels. Messages about a *descriptor* mean a missing kernel instead.
    r"|could not (create|execute) a (primitive|memory)(?!.*descriptor)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error of any device."""
    classes = (MemoryError, getattr(torch, "OutOfMemoryError", MemoryError))
    return isinstance(error, classes) or _MESSAGES.search(str(error).lower()) is not None


def release_frames(error: BaseException) -> None:
    """Frees the local variables in the traceback of an error that will still be raised."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    collect_what_failed()


def collect_what_failed() -> None:
    """Frees the tensors of a failed pass. Call it after the `except` block, since the error's traceback holds them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def score_in_parts(batch: Batch, score: Callable[[Batch], TokenScores]) -> TokenScores:
    """Scores the batch, or on an out-of-memory error its halves, recursively.

    For passes without gradient, auxiliary loss and collectives. RuntimeError if one row alone does not fit.
    """
    try:
        return score(batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if batch.num_rows < 2:
            raise RuntimeError(
                f"scoring one row alone ({batch.num_tokens} tokens besides {len(batch.prompt_ids)} of its prompt) does "
                "not fit into memory; lower max_completion_length, shorten the prompts, set bf16=True, or use a "
                "smaller model"
            ) from error
    collect_what_failed()
    _warn_once()
    middle = batch.num_rows // 2
    parts = [batch.select(range(*bounds)) for bounds in ((0, middle), (middle, batch.num_rows))]
    scores = [score_in_parts(part, score) for part in parts]
    return TokenScores(torch.cat([s.logprobs for s in scores]), torch.cat([s.entropy for s in scores]))


@cache
def _warn_once() -> None:
    logger.warning(
        "scoring a batch without gradients does not fit into memory and is done in parts, with the same result; a "
        "lower per_device_train_batch_size or per_device_eval_batch_size avoids that"
    )
