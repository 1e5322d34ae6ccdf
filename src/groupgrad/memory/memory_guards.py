"""Chooses how a run trains micro-batches that do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from groupgrad.batch import Batch
from groupgrad.memory.oom_retry import MemoryGuard, tokens_per_pass
from groupgrad.models.unwrapping import pretrained

LARGE_MODEL = 16_000_000
"""Trained parameters from which on training on a CPU returns free memory of the heap before each backward pass.

To ask how much is free takes about a millisecond, which the steps of smaller models would notice. Models whose passes
are collectives (FSDP, ZeRO-3) do without.
"""


def memory_guard(
    model: nn.Module,
    args: Any,
    clear: Callable[[], None],
    *,
    aux_loss: bool,
    prepare: Callable[[Batch], None] | None = None,
    is_joint: bool = False,
) -> MemoryGuard:
    """The guard for a run with these training arguments.

    `clear` drops the gradients of a step, `prepare` is called with each batch before its passes with a gradient.
    `is_joint`: the ranks share the model, so that its passes are collectives.

    A CPU's matrix products run at full speed from few tokens on, so larger micro-batches are cut there. A
    load-balancing loss depends on the cut, so its micro-batches stay whole. ValueError if `max_tokens_per_pass` is set
    and micro-batches cannot be cut.
    """
    obstacle = None if is_joint else obstacle_to_cutting(args)
    reason = "the load-balancing loss (router_aux_loss_coef) depends on the rows of a pass" if aux_loss else obstacle
    if args.max_tokens_per_pass is not None and reason is not None:
        raise ValueError(
            f"max_tokens_per_pass={args.max_tokens_per_pass} cuts micro-batches, and {reason}; leave it unset and "
            "lower per_device_train_batch_size instead"
        )
    is_cpu = args.device.type == "cpu"
    max_tokens = args.max_tokens_per_pass
    if max_tokens is None and is_cpu and not aux_loss:
        config: Any = getattr(pretrained(model), "config", None)
        width = None if config is None else getattr(config.get_text_config(), "hidden_size", None)
        max_tokens = tokens_per_pass() if width is None else tokens_per_pass(width)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    num_ranks = args.context_parallel_size
    return MemoryGuard(
        clear,
        obstacle=reason if is_joint else obstacle,
        max_tokens=max_tokens,
        prepare=prepare,
        num_ranks=num_ranks,
        is_joint=is_joint,
        returns_memory=is_cpu and not is_joint and num_trained >= LARGE_MODEL,
    )


def obstacle_to_cutting(args: Any) -> str | None:
    """Names the reason why a run with these training arguments cannot train a micro-batch in parts; None if it can."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    if args.deepspeed is not None or getattr(args, "deepspeed_plugin", None) is not None:
        return "DeepSpeed keeps the gradients to itself, so that they cannot be made again"
    if "lomo" in optimizer or "layerwise" in optimizer:
        return f"optim={optimizer!r} changes weights while gradients are made, so that they cannot be made again"
    return None
