"""Colocate engine: vLLM in the training process, with a second copy of the weights that `push` refreshes.

One process holds one engine. With several ranks each samples its own rows, and vLLM joins the ranks' process group
("external launcher"), so all ranks start their engines together; that was tested on CPUs, not on several GPUs.
Sleeping is vLLM's, for GPUs; it was tested against a simulated vLLM only.

With a tensor parallel size of t, t consecutive ranks hold one model together, a shard each. vLLM's "external launcher"
runs the same engine in each of them: all must be given the same rows in the same order, and step together.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupgrad import dist
from groupgrad.engines.base import Request, Sample, SamplingOptions, TicketSession
from groupgrad.integrations.vllm.colocate_start import (
    ColocateOptions,
    check_tensor_parallel,
    classes_restored,
    save_config,
    start,
)
from groupgrad.integrations.vllm.media import check_prompt, vllm_prompt
from groupgrad.integrations.vllm.vllm_params import (
    FINISH_REASONS,
    adapter_bytes,
    check_options,
    lora_request,
    plain_errors,
    refusal,
    row_fields,
    sampled_logprobs,
    sampling_fields,
    sampling_params,
)
from groupgrad.integrations.vllm.vllm_policy import Push, VLLMEngine
from groupgrad.integrations.vllm.weight_sender import PolicyWeights, push_in_process
from groupgrad.integrations.vllm.wire import torch_dtype
from groupgrad.models.recurrent_classes import recurrent_classes
from groupgrad.models.unwrapping import unwrap
from groupgrad.models.weights import adapter_files


class VLLMColocateEngine(VLLMEngine):
    """Samples with vLLM in this process; `vllm_params` says of which distribution its log-probs are.

    At the start only the policy's config and tokenizer (or processor) are read; weights come with the first `push` or
    `push_adapter`. ImportError without vLLM, ValueError for options that cannot work here.

    vLLM fuses projections that transformers keeps apart and packs them for its kernels, so it holds its own weights.
    The policy's are only read: by reference where they are unsharded, of vLLM's dtype and without an adapter, otherwise
    as copies of one bucket at a time.

    With several ranks all start, push and sample together; with `tensor_parallel_size` t, each t ranks hold one model.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, options: ColocateOptions):
        super().__init__(options.regex)
        inner: Any = unwrap(model)
        check_tensor_parallel(inner.config.get_text_config(), options.tensor_parallel_size, ranks=dist.world_size())
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="groupgrad-vllm-")
        folder = Path(self._folder.name) / "model"
        save_config(model, tokenizer, folder)
        is_recurrent = bool(getattr(inner, "_is_stateful", False) or recurrent_classes(inner))
        with classes_restored(model):
            self._llm = start(str(folder), options, is_recurrent=is_recurrent)
        self._engine = self._llm.llm_engine
        self.max_model_len, self.logprobs_mode = int(self._engine.model_config.max_model_len), options.logprobs_mode
        self._asleep: set[str] = set()
        """Memory that vLLM has freed: `weights`, `kv_cache`."""
        self._has_base = False
        """True while vLLM has the weights below the adapter, which do not change in training."""
        self._adapter: Any = None
        """vLLM's request for the adapter that rows are sampled with."""
        self._num_adapters = 0
        self._is_closed = False

    def _push(self, push: Push) -> str:
        """Loads the weights, or the adapter; before the first adapter also the base weights.

        No row may be under way. RuntimeError if parameters of vLLM's model were left without new values.
        """
        contents = None
        if push.kind == "adapter":
            contents = adapter_bytes(adapter_files(push.model), torch_dtype(self._options.dtype))
        self._wake("weights")
        self._weight_version, self._last_push = None, push
        if contents is None or not self._has_base:
            self._has_base = False
            weights = PolicyWeights(push.model, merge=contents is None)
            push_in_process(self._llm, weights, dtype=torch_dtype(self._options.dtype))
            self._has_base = contents is not None
        self._use_adapter(push.weight_version, contents)
        # Drop everything computed with earlier weights; image features have a cache of their own.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not forget what it computed with the weights before")
        self._engine.reset_encoder_cache()
        self._llm.update_weight_version(push.weight_version)
        self._weight_version = push.weight_version
        return push.weight_version

    def _use_adapter(self, weight_version: str, contents: tuple[bytes, bytes] | None) -> None:
        previous, adapter, self._adapter = self._adapter, None, None
        if contents is not None:
            self._num_adapters += 1
            with lora_request(weight_version, self._num_adapters, *contents) as adapter:
                if not self._engine.add_lora(adapter):
                    raise RuntimeError(f"vLLM did not load the adapter {weight_version!r}")
        if previous is not None:
            self._engine.remove_lora(previous.lora_int_id)
        self._adapter = adapter

    def check(self, options: SamplingOptions, *, num_tokens: int = 0) -> None:
        """ValueError for sampling options that vLLM refuses, and for `num_tokens` of prompt and completion that exceed
        its context."""
        if num_tokens > self.max_model_len:
            raise ValueError(
                f"vLLM's context holds {self.max_model_len} tokens, but prompt and completion may have {num_tokens}; "
                "raise vllm_max_model_length or lower max_completion_length"
            )
        fields = sampling_fields(options, regex=self._options.regex)
        try:
            check_options(fields, self._engine)
        except ValueError as error:
            raise refusal(f"vLLM refuses the sampling options: {error}", fields, self._options.regex) from None

    def session(self, options: SamplingOptions) -> closing[Any]:
        """A session over the engine; requests that have not ended when it is closed are aborted.

        Collective of the ranks that hold one model. After `sleep` the policy's present weights are loaded first, so
        samples never come from weights older than the policy's.
        """
        if "weights" in self._asleep and self._last_push is not None:
            self._push(replace(self._last_push))
        local = ColocateSession(self, sampling_fields(options, regex=self._options.regex))
        self.check(options)
        self._wake("kv_cache")
        return closing(local if self._options.tensor_parallel_size == 1 else _tensor_parallel(local))

    def sleep(self) -> None:
        """Frees vLLM's memory, weights and cache, until the next push or sample; does nothing without `sleep_mode`.

        Every later push sends what training changes; the weights below an adapter are sent again only after level 2.
        """
        if not self._options.sleep_mode or self._asleep:
            return
        self._llm.sleep(level=self._options.sleep_level)
        self._asleep = {"weights", "kv_cache"}
        self._has_base = self._has_base and self._options.sleep_level == 1

    def close(self) -> None:
        """Ends vLLM in this process. A second call does nothing: vLLM would end what a later engine has set up."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.engine_core.shutdown()
            self._folder.cleanup()

    def _wake(self, part: str) -> None:
        """Allocates this part again, if it sleeps. The cache is woken last: a push needs memory too."""
        if part in self._asleep:
            self._llm.wake_up(tags=[part])
            self._asleep.discard(part)


class ColocateSession(TicketSession):
    """A session over vLLM's engine; each `advance` is one of its steps.

    Every sample is checked: its weights are those of the session's beginning, by the weight version that vLLM has
    recorded, and vLLM's prompt is the request's, images included.
    """

    def __init__(self, owner: VLLMColocateEngine, fields: dict[str, Any]):
        super().__init__()
        self._engine, self._fields = owner._engine, fields
        self._weight_version, self._adapter = owner.weight_version, owner._adapter
        self._tickets: dict[str, int] = {}
        """Tickets by vLLM's request id."""

    def submit(self, request: Request) -> int:
        """Ticket of a request that is sampled from now on. ValueError, with vLLM's reason, if it does not fit."""
        from vllm.sampling_params import RequestOutputKind

        request_id = f"groupgrad-{uuid.uuid4().hex}"
        params = sampling_params(self._fields, row_fields(request), output_kind=RequestOutputKind.FINAL_ONLY)
        images = () if request.media is None else request.media.images
        prompt = vllm_prompt(request.prompt_ids, images, self._engine)
        with plain_errors():
            self._engine.add_request(request_id, prompt, params, lora_request=self._adapter)
        self._tickets[request_id] = self._register(request)
        return self._tickets[request_id]

    def advance(self) -> list[tuple[int, Sample]]:
        """Samples about a token for each open request; returns the rows that ended, in ticket order.

        ValueError for a row whose prompt vLLM changed; RuntimeError for an aborted row, and if the weights are not
        those of this session.
        """
        if not self._open:
            return []
        # vLLM also draws from the global stream, before it replaces these draws by each row's own.
        stream = torch.get_rng_state()
        outputs = self._engine.step()
        torch.set_rng_state(stream)
        ended = []
        for output in outputs:
            if output.finished:
                ticket = self._tickets.pop(output.request_id)
                ended.append((ticket, self._sample(ticket, self._open.pop(ticket), output)))
        return sorted(ended, key=lambda pair: pair[0])

    def _sample(self, ticket: int, request: Request, output: Any) -> Sample:
        """The sample of a finished row, checked."""
        check_prompt(request.prompt_ids, output.prompt_token_ids)
        part = output.outputs[0]
        versions = [span.version for span in part.weight_versions or ()]  # a row without tokens has none
        if any(version != self._weight_version for version in versions):
            raise RuntimeError(f"row {ticket} was sampled from the weights {versions}, not {self._weight_version!r}")
        ids = list(part.token_ids)
        if part.finish_reason not in FINISH_REASONS:
            raise RuntimeError(
                f"vLLM gave up row {ticket} (a prompt of {len(request.prompt_ids)} tokens) after {len(ids)} tokens, "
                f"for the reason {part.finish_reason!r}; its own output says more"
            )
        return Sample(ids, FINISH_REASONS[part.finish_reason], sampled_logprobs(ids, part.logprobs))

    def abort(self, tickets: Iterable[int]) -> None:
        """Stops sampling these rows."""
        aborted = set(tickets)
        request_ids = [request_id for request_id, ticket in self._tickets.items() if ticket in aborted]
        if request_ids:
            self._engine.abort_request(request_ids)
        for request_id in request_ids:
            del self._open[self._tickets.pop(request_id)]

    def close(self) -> None:
        """Aborts rows that have not ended."""
        self.abort(self._open)


class TensorParallelSession(TicketSession):
    """A session of the ranks that hold one model together: the rows of every rank are sampled by all of them.

    `advance` and `close` are collectives of these ranks, in any combination: a rank without rows goes on sampling for
    the others in `close`, until all have called it. `local` is this rank's `ColocateSession`; `gather` returns each
    rank's object, in the same order everywhere.
    """

    def __init__(self, local: Any, rank: int, gather: Callable[[Any], list[Any]]):
        super().__init__()
        self._local, self._rank, self._gather = local, rank, gather
        self._owners: dict[int, tuple[int, int]] = {}
        """Rank, and ticket of that rank, by the local session's ticket."""
        self._aborted: set[int] = set()
        """Tickets of this rank that the others have to hear of."""

    def advance(self) -> list[tuple[int, Sample]]:
        """Collective. Samples about a token for the requests of all ranks; returns this rank's rows that ended."""
        return self._step(closing=False) or []

    def abort(self, tickets: Iterable[int]) -> None:
        """The ranks stop sampling these rows at the next `advance`."""
        self._aborted.update(tickets)
        super().abort(self._aborted)

    def close(self) -> None:
        """Collective. Aborts this rank's open rows, and goes on sampling until the other ranks are done."""
        self._unsent.clear()
        self._open.clear()
        try:
            while self._step(closing=True) is not None:
                pass
        finally:
            self._local.close()

    def _step(self, *, closing: bool) -> list[tuple[int, Sample]] | None:
        """This rank's rows that ended, in ticket order; None once all ranks are closing."""
        unsent = [(ticket, self._open[ticket]) for ticket in self._unsent]
        gathered = self._gather((closing, unsent, self._aborted))
        self._unsent, self._aborted = [], set()
        if all(is_closing for is_closing, _, _ in gathered):
            return None
        aborted = [
            local_ticket
            for local_ticket, (owner, ticket) in self._owners.items()
            if gathered[owner][0] or ticket in gathered[owner][2]
        ]
        for ticket in aborted:
            del self._owners[ticket]
        self._local.abort(aborted)
        for owner, (_, requests, _) in enumerate(gathered):
            for ticket, request in requests:
                self._owners[self._local.submit(request)] = (owner, ticket)
        ended: list[tuple[int, Sample]] = []
        for local_ticket, sample in self._local.advance():
            owner, ticket = self._owners.pop(local_ticket)
            if owner == self._rank:
                self._open.pop(ticket, None)
                ended.append((ticket, sample))
        return sorted(ended, key=lambda pair: pair[0])


def _tensor_parallel(local: ColocateSession) -> TensorParallelSession:
    """The session of all ranks that hold one model with this one."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return TensorParallelSession(local, group.rank_in_group, lambda obj: dist.all_gather_objects(obj, group.cpu_group))
