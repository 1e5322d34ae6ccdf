"""Makes the `WeightSender` of groupgrad's own trainer, through vLLM's factory where vLLM is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from groupgrad.integrations.vllm.transfer_plugin import register
from groupgrad.integrations.vllm.weight_sender import PolicyWeights, WeightSender, read_along


def sender_of(
    source: PolicyWeights, client: Any, before: WeightSender | None = None, *, by_reference: bool = False
) -> WeightSender:
    """A sender for `source` that is connected to the workers; `before` itself if its source is equal.

    vLLM's factory makes it. A trainer without vLLM, which uses a server, makes the same class directly. After an error
    the weights have been read to the end.
    """
    if before is not None and before.source == source:
        return before
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    except ImportError:
        init: Any = SimpleNamespace(is_sender=True, by_reference=by_reference)
        trainer_init: Any = WeightSender.trainer_init
    else:
        from groupgrad.integrations.vllm.transfer_engine import SenderInit

        register()
        init, trainer_init = SenderInit(rank=0, by_reference=by_reference), WeightTransferTrainerFactory.trainer_init
    try:
        return trainer_init(init, client=client, source=source)
    except BaseException:
        read_along(source)
        raise
