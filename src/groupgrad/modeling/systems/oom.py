"""Memory that ran out: telling it from other errors, and scoring a batch in parts where it does."""

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
    # A CPU's matrix library, which allocates when it makes and runs its kernels. Without a *descriptor* there is no
    # kernel for what was asked, and memory has nothing to do with it.
    r"|could not (create|execute) a (primitive|memory)(?!.*descriptor)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, on whatever device."""
    kinds = (MemoryError, getattr(torch, "OutOfMemoryError", MemoryError))
    return isinstance(error, kinds) or _MESSAGES.search(str(error).lower()) is not None


def release_frames(error: BaseException) -> None:
    """Free what an error that is still to be raised holds: the variables of the functions that it came through."""
    part: BaseException | None = error
    while part is not None:
        traceback.clear_frames(part.__traceback__)
        part = part.__cause__ or part.__context__
    collect_what_failed()


def collect_what_failed() -> None:
    """Free what a pass that ran out of memory has left. Its error must be gone: the traceback holds its tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def score_in_parts(batch: Batch, score: Callable[[Batch], TokenScores]) -> TokenScores:
    """What `score` says of the batch; where memory runs out, of half of its rows at a time, and so on.

    For passes without a gradient and without an auxiliary loss, through a model that no other rank has to go through at
    the same time. RuntimeError if one row alone does not fit.
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
    _tell()
    middle = batch.num_rows // 2
    parts = [batch.select(range(*bounds)) for bounds in ((0, middle), (middle, batch.num_rows))]
    scores = [score_in_parts(part, score) for part in parts]
    return TokenScores(torch.cat([s.logprobs for s in scores]), torch.cat([s.entropy for s in scores]))


@cache
def _tell() -> None:
    """Warn, once a run: the same batches come again and again."""
    logger.warning(
        "scoring a batch without gradients does not fit into memory and is done in parts, with the same result; a "
        "lower per_device_train_batch_size or per_device_eval_batch_size avoids that"
    )
