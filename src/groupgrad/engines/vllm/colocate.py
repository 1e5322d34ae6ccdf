"""vLLM in the process that trains: a second copy of the weights on the same device, refreshed by `push`.

One process holds one engine. With several ranks each samples its own rows, and vLLM joins the ranks' process group
("external launcher"), so all ranks start their engines together; that form was tried on CPUs, not on several GPUs.
Sleeping is vLLM's own, for GPUs; it was tried against a stand-in for vLLM only.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from groupgrad import compat, dist
from groupgrad.engines.base import Request, Sample, SamplingOptions, sample_all
from groupgrad.engines.vllm.colocate_start import ColocateOptions, classes_kept, save_config, start
from groupgrad.engines.vllm.lora import lora_rank, lora_request, write_adapter
from groupgrad.engines.vllm.media import check_prompt, vllm_prompt
from groupgrad.engines.vllm.ranks import JointSession, check_tensor_parallel
from groupgrad.engines.vllm.vllm_params import (
    REASONS,
    in_plain_errors,
    is_plain,
    refusal,
    row_fields,
    sampled_logprobs,
    sampling_fields,
    sampling_params,
    verify,
)
from groupgrad.engines.vllm.wire import BUCKET_BYTES, TensorSpec, dtype_name, notes_as_lists, torch_dtype
from groupgrad.modeling.scoring.forward import unwrap
from groupgrad.modeling.weights import adapter_files, served_weights, weights_to_the_end

__all__ = ["ColocateOptions", "ColocateSession", "VLLMColocateEngine"]


@dataclass(slots=True)
class _Pushed:
    """What was pushed last, so that what slept can be given it again."""

    model: nn.Module
    policy_step: int
    kind: Literal["weights", "adapter"]


class VLLMColocateEngine:
    """Samples with vLLM in this process; `sampling.py` says of which distribution its log-probs are.

    Only the policy's config and tokenizer (or processor) are read when it starts; weights come with the first `push`
    or `push_adapter`. ImportError without vLLM, ValueError for options that cannot work here.

    vLLM joins projections that transformers keeps apart and packs them for its kernels, so it holds weights of its
    own. Where the policy's parameters are whole, have vLLM's dtype and carry no adapter, it reads them by reference,
    straight into its own; where they are sharded, of another dtype, or merged with an adapter, a bucket of copies is
    made at a time. The policy's own weights are only read.

    With several ranks all start, push and sample together; with `tensor_parallel_size` t, each t ranks hold one model.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, options: ColocateOptions):
        compat.require("vllm", 'vllm_mode="colocate"')
        inner: Any = unwrap(model)
        check_tensor_parallel(inner.config, options.tensor_parallel_size, ranks=dist.world_size())
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="groupgrad-vllm-")
        save_config(model, tokenizer, Path(self._folder.name) / "model")
        with classes_kept(model):
            self._llm = start(str(Path(self._folder.name) / "model"), options)
        self._weight_version: str | None = None
        self._asleep: set[str] = set()
        """What vLLM has given back: `weights`, `kv_cache`."""
        self._last: _Pushed | None = None
        self._base_is_whole = False
        """True while vLLM has the weights below the adapter, which do not change in training."""
        self._adapter: Any = None
        """vLLM's request for the adapter that rows are sampled with."""
        self._num_adapters = 0

    @property
    def weight_version(self) -> str:
        """Of the weights that samples come from: the policy_step, and a word that no other push has. ValueError if
        nothing was pushed, or a push failed."""
        if self._weight_version is None:
            raise ValueError("vLLM has no whole weights: call push before sampling (the last push failed, or none was)")
        return self._weight_version

    @property
    def policy_step(self) -> int:
        """The version of the weights that samples come from. ValueError if there are none."""
        return int(self.weight_version.rpartition("-")[0])

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return int(self._engine.model_config.max_model_len)

    def push(self, model: nn.Module, policy_step: int) -> str:
        """Give vLLM all weights, adapters merged, as that version; gives their weight_version. Collective if they are sharded.

        RuntimeError if rows are being sampled, or if parameters of vLLM's model were left without new values.
        """
        self._begin(_Pushed(model, policy_step, "weights"))
        self._base_is_whole = False
        self._load(model, merge=True)
        self._use_adapter(None)
        return self._become(policy_step)

    def push_adapter(self, model: nn.Module, policy_step: int) -> str:
        """Give vLLM the active LoRA adapter as that version; gives its weight_version. Collective if it is sharded.

        The weights below it are given once. ValueError if the engine was not started for adapters of its rank
        (`ColocateOptions.max_lora_rank`), or for an adapter that can only be merged.
        """
        files = adapter_files(model)
        rank, largest = int(files.config["r"]), self._options.max_lora_rank
        if rank > (lora_rank(largest) if largest else 0):
            has = f"was started for adapters up to rank {largest}" if largest else "was started without adapters"
            raise ValueError(f"the adapter has rank {rank}, but vLLM {has}; merge it into the weights instead (push)")
        self._begin(_Pushed(model, policy_step, "adapter"))
        if not self._base_is_whole:
            self._load(model, merge=False)
            self._base_is_whole = True
        self._num_adapters += 1
        weight_version = _new_weight_version(policy_step)
        folder = Path(self._folder.name) / f"adapter-{self._num_adapters}"
        write_adapter(files, torch_dtype(self._options.dtype), folder)
        self._use_adapter(lora_request(weight_version, self._num_adapters, folder))
        return self._become(policy_step, weight_version)

    def _begin(self, pushed: _Pushed) -> None:
        if self._engine.has_unfinished_requests():
            raise RuntimeError("weights cannot change while rows are sampled; close the session first")
        self._wake("weights")
        self._weight_version, self._last = None, pushed

    def _load(self, model: nn.Module, *, merge: bool) -> None:
        dtype = torch_dtype(self._options.dtype)
        notes = [
            TensorSpec(name, dtype_name(dtype if empty.is_floating_point() else empty.dtype), tuple(empty.shape))
            for name, empty in served_weights(model, merge=merge, shapes_only=True)
        ]
        with torch.no_grad(), weights_to_the_end(model, merge=merge) as weights:
            self._llm.collective_rpc("groupgrad_begin", args=(notes_as_lists(notes),))
            for tensors in _chunks(weights, dtype):
                self._llm.collective_rpc("groupgrad_tensors", args=(tensors,))
            self._llm.collective_rpc("groupgrad_commit", args=(len(notes),))

    def _use_adapter(self, adapter: Any) -> None:
        before, self._adapter = self._adapter, None
        if adapter is not None and not self._engine.add_lora(adapter):
            raise RuntimeError(f"vLLM did not load the adapter {adapter.lora_name!r}")
        if before is not None:
            self._engine.remove_lora(before.lora_int_id)
            shutil.rmtree(before.lora_path, ignore_errors=True)
        self._adapter = adapter

    def _become(self, policy_step: int, weight_version: str | None = None) -> str:
        """From here on the weights are those of the push. What was computed with others is forgotten."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not forget what it computed with the weights before")
        # What it saw in images is kept by another name.
        self._engine.reset_encoder_cache()
        self._weight_version = weight_version or _new_weight_version(policy_step)
        return self._weight_version

    def check(self, options: SamplingOptions, *, num_tokens: int = 0) -> None:
        """ValueError if vLLM refuses the sampling options, or a prompt and its completion may have more tokens than
        its context holds."""
        if num_tokens > self.max_model_len:
            raise ValueError(
                f"vLLM's context holds {self.max_model_len} tokens, but prompt and completion may have {num_tokens}; "
                "raise vllm_max_model_length or lower max_completion_length"
            )
        fields = sampling_fields(options, regex=self._options.regex)
        try:
            verify(sampling_params(fields, {"seed": 0, "max_tokens": 1}), self._engine)
        except ValueError as error:
            raise refusal(f"vLLM refuses the sampling options: {error}", fields, self._options.regex) from None

    def plain_logprobs(self, options: SamplingOptions) -> bool:
        """True if the log-probs of samples are those of the temperature softmax, as training scores tokens; False if
        they are renormalised over what cuts, penalties or a regex left."""
        return is_plain(sampling_fields(options, regex=self._options.regex), self._options.logprobs_mode)

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        with self.session(options) as session:
            return sample_all(session, requests)

    @contextmanager
    def session(self, options: SamplingOptions) -> Iterator[ColocateSession | JointSession]:
        """A session over the engine; collective of the ranks that hold one model.

        What has not ended when it is closed is given up. After `sleep` the policy's present weights are given to vLLM
        again, so what it samples from is never older than the policy.
        """
        if "weights" in self._asleep and self._last is not None:
            last = self._last
            (self.push if last.kind == "weights" else self.push_adapter)(last.model, last.policy_step)
        weight_version = self.weight_version
        self.check(options)
        self._wake("kv_cache")
        fields = sampling_fields(options, regex=self._options.regex)
        own = ColocateSession(self._engine, fields, lambda: self._weight_version, weight_version, self._adapter)
        session = own if self._options.tensor_parallel_size == 1 else _jointly(own)
        try:
            yield session
        finally:
            session.close()

    def sleep(self) -> None:
        """Give vLLM's memory back, weights and cache, until the next push or sample; nothing happens without
        `sleep_mode`. RuntimeError if rows are being sampled."""
        if not self._options.sleep_mode or self._asleep:
            return
        if self._engine.has_unfinished_requests():
            raise RuntimeError("vLLM cannot sleep while rows are sampled; close the session first")
        self._llm.sleep(level=2)
        self._asleep = {"weights", "kv_cache"}
        self._base_is_whole = False

    def close(self) -> None:
        """End vLLM in this process."""
        self._engine.engine_core.shutdown()
        self._folder.cleanup()

    def _wake(self, part: str) -> None:
        """The cache is woken as late as can be: a push needs memory too."""
        if part in self._asleep:
            self._llm.wake_up(tags=[part])
            self._asleep.discard(part)

    @property
    def _engine(self) -> Any:
        return self._llm.llm_engine


class ColocateSession:
    """Requests may come at any time; each `advance` is one step of vLLM's engine.

    Every sample is checked: the weights are still those of `weight_version` when it ends, its adapter is theirs, and the prompt
    that vLLM made of ids and images is the one that it was given.
    """

    def __init__(
        self,
        engine: Any,
        fields: dict[str, Any],
        current: Callable[[], str | None],
        weight_version: str,
        adapter: Any = None,
    ):
        self._engine, self._fields = engine, fields
        self._current, self._weight_version, self._adapter = current, weight_version, adapter
        self._tickets: dict[str, tuple[int, Request]] = {}
        self._num_submitted = 0

    def submit(self, request: Request) -> int:
        """The ticket of a request that is sampled from now on. ValueError, in vLLM's words, if it does not fit."""
        from vllm.sampling_params import RequestOutputKind

        ticket = self._num_submitted
        self._num_submitted += 1
        name = f"groupgrad-{uuid.uuid4().hex}"
        told = RequestOutputKind.FINAL_ONLY
        params = sampling_params(self._fields, row_fields(request), output_kind=told)
        images = () if request.media is None else request.media.images
        prompt = vllm_prompt(request.prompt_ids, images, self._engine)
        with in_plain_errors():
            self._engine.add_request(name, prompt, params, lora_request=self._adapter)
        self._tickets[name] = ticket, request
        return ticket

    def advance(self) -> list[tuple[int, Sample]]:
        """Sample about a token for each request under way; those that ended by it, in ticket order.

        ValueError for a row whose prompt vLLM changed; RuntimeError for one that it gave up, and if the weights are not
        those of this session.
        """
        ended: list[tuple[int, Sample]] = []
        if not self._tickets:
            return ended
        # vLLM draws from the global stream too, and then takes each row's own draws.
        stream = torch.get_rng_state()
        outputs = self._engine.step()
        torch.set_rng_state(stream)
        for output in outputs:
            if output.finished:
                ticket, request = self._tickets.pop(output.request_id)
                self._check(ticket, request, output)
                part = output.outputs[0]
                ids = list(part.token_ids)
                if part.finish_reason not in REASONS:
                    length = len(request.prompt_ids)
                    raise RuntimeError(
                        f"vLLM gave up row {ticket} (a prompt of {length} tokens) after {len(ids)} tokens, for the "
                        f"reason {part.finish_reason!r}; its own output says more"
                    )
                ended.append((ticket, Sample(ids, REASONS[part.finish_reason], sampled_logprobs(ids, part.logprobs))))
        return sorted(ended, key=lambda pair: pair[0])

    def _check(self, ticket: int, request: Request, output: Any) -> None:
        check_prompt(request.prompt_ids, output.prompt_token_ids)
        if self._current() != self._weight_version:
            raise RuntimeError(
                f"row {ticket} was begun with {self._weight_version!r} and ended with {self._current()!r}"
            )
        used = getattr(output.lora_request, "lora_name", None)
        expected = getattr(self._adapter, "lora_name", None)
        if used != expected:
            raise RuntimeError(f"row {ticket} was sampled with the adapter {used!r}, not {expected!r}")

    @property
    def num_open(self) -> int:
        """Requests submitted that have not ended."""
        return len(self._tickets)

    def release(self, ticket: int) -> None:
        """Nothing is kept but what vLLM's prefix cache holds, so nothing happens."""

    def give_up(self, tickets: Sequence[int]) -> None:
        """Sample these no further."""
        names = [name for name, (ticket, _) in self._tickets.items() if ticket in tickets]
        if names:
            self._engine.abort_request(names)
        for name in names:
            del self._tickets[name]

    def close(self) -> None:
        """Give up rows that have not ended."""
        self.give_up([ticket for ticket, _ in self._tickets.values()])


def _jointly(own: ColocateSession) -> JointSession:
    """The session of all ranks that hold one model with this one."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return JointSession(own, group.rank_in_group, lambda obj: dist.all_gather_objects(obj, group.cpu_group))


def _new_weight_version(policy_step: int) -> str:
    return f"{policy_step}-{uuid.uuid4().hex[:8]}"


def _chunks(tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[list[tuple[str, Any]]]:
    """Lists of tensors in vLLM's dtype, those that have it already as they are, of about `BUCKET_BYTES`."""
    chunk: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        ready = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if chunk and num_bytes + ready.nbytes > BUCKET_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append((name, ready))
        num_bytes += ready.nbytes
    if chunk:
        yield chunk
