"""vLLM in the process that trains: a second copy of the weights on the same device, refreshed by `push`.

One process holds one engine. With several ranks each samples its own rows, and vLLM joins the ranks' process group
("external launcher"), so all ranks start their engines together; that form was tried on CPUs, not on several GPUs.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupgrad import compat
from groupgrad.engines.base import Request, Sample, SamplingOptions, sample_all
from groupgrad.engines.vllm.sampling import is_plain, row_fields, sampled_logprobs, sampling_fields, sampling_params
from groupgrad.engines.vllm.start import ColocateOptions, save_config, start
from groupgrad.engines.vllm.wire import TensorNote, dtype_name, notes_as_lists, torch_dtype
from groupgrad.models.weights import served_weights

__all__ = ["ColocateOptions", "ColocateSession", "VLLMColocateEngine"]

TENSORS_AT_A_TIME = 64


class VLLMColocateEngine:
    """Samples with vLLM in this process; `sampling.py` says of which distribution its log-probs are.

    Only the policy's config and tokenizer are read when it starts; weights come with the first `push`.
    ImportError without vLLM, ValueError for options that cannot work here.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, options: ColocateOptions):
        compat.require("vllm", 'vllm_mode="colocate"')
        if options.tensor_parallel_size != 1:
            raise ValueError(
                f"vllm_tensor_parallel_size is {options.tensor_parallel_size}, but vLLM in the training process runs "
                'on one device; set it to 1, or use vllm_mode="server" and give it to `groupgrad vllm-serve`'
            )
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="groupgrad-vllm-")
        save_config(model, tokenizer, Path(self._folder.name))
        self._llm = start(self._folder.name, options)
        self._stamp: str | None = None
        self._asleep = False
        self._last: tuple[nn.Module, int] | None = None

    @property
    def stamp(self) -> str:
        """Of the weights that samples come from: the version, and a word that no other push has. ValueError if
        nothing was pushed, or a push failed."""
        if self._stamp is None:
            raise ValueError("vLLM has no whole weights: call push before sampling (the last push failed, or none was)")
        return self._stamp

    @property
    def version(self) -> int:
        """The version of the weights that samples come from. ValueError if there are none."""
        return int(self.stamp.rpartition("-")[0])

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return int(self._engine.model_config.max_model_len)

    def push(self, model: nn.Module, version: int) -> str:
        """Give vLLM all weights, adapters merged, as that version; gives their stamp. Collective if they are sharded.

        RuntimeError if rows are being sampled, or if parameters of vLLM's model were left without new values.
        """
        if self._engine.has_unfinished_requests():
            raise RuntimeError("weights cannot change while rows are sampled; close the session first")
        self._wake()
        self._stamp, self._last = None, (model, version)
        dtype = torch_dtype(self._options.dtype)
        notes = [
            TensorNote(name, dtype_name(dtype if empty.is_floating_point() else empty.dtype), tuple(empty.shape))
            for name, empty in served_weights(model, shapes_only=True)
        ]
        with torch.no_grad():
            self._llm.collective_rpc("groupgrad_begin", args=(notes_as_lists(notes),))
            for tensors in _chunks(served_weights(model), dtype):
                self._llm.collective_rpc("groupgrad_tensors", args=(tensors,))
            self._llm.collective_rpc("groupgrad_commit", args=(len(notes),))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not forget what it computed with the weights before")
        self._stamp = f"{version}-{uuid.uuid4().hex[:8]}"
        return self._stamp

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
            sampling_params(fields, {"seed": 0, "max_tokens": 1})
        except (TypeError, ValueError) as error:
            raise ValueError(f"vLLM refuses the sampling options {fields}: {error}; see generation_kwargs") from None

    def plain_logprobs(self, options: SamplingOptions) -> bool:
        """True if the log-probs of samples are those of the temperature softmax, as training scores tokens; False if
        they are renormalised over what cuts, penalties or a regex left."""
        return is_plain(sampling_fields(options, regex=self._options.regex), self._options.logprobs_mode)

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        with self.session(options) as session:
            return sample_all(session, requests)

    @contextmanager
    def session(self, options: SamplingOptions) -> Iterator[ColocateSession]:
        """A session over the engine. What has not ended when it is closed is given up."""
        if self._asleep and self._last is not None:
            # Sleeping dropped the weights: what wakes up is given them again before it samples.
            self.push(*self._last)
        assert self.stamp
        self.check(options)
        session = ColocateSession(self._engine, sampling_fields(options, regex=self._options.regex))
        try:
            yield session
        finally:
            session.close()

    def sleep(self) -> None:
        """Give vLLM's memory back until the next `push` or sample; nothing happens without `sleep_mode`."""
        if self._options.sleep_mode and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def close(self) -> None:
        """End vLLM in this process."""
        self._engine.engine_core.shutdown()
        self._folder.cleanup()

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    @property
    def _engine(self) -> Any:
        return self._llm.llm_engine


class ColocateSession:
    """Requests may come at any time; each `advance` is one step of vLLM's engine."""

    def __init__(self, engine: Any, fields: dict[str, Any]):
        self._engine, self._fields = engine, fields
        self._tickets: dict[str, int] = {}
        self._num_submitted = 0

    def submit(self, request: Request) -> int:
        """The ticket of a request that is sampled from now on. ValueError, in vLLM's words, if it does not fit."""
        from vllm.sampling_params import RequestOutputKind

        ticket = self._num_submitted
        self._num_submitted += 1
        name = f"groupgrad-{uuid.uuid4().hex}"
        told = RequestOutputKind.FINAL_ONLY
        params = sampling_params(self._fields, row_fields(request), output_kind=told)
        self._engine.add_request(name, {"prompt_token_ids": list(request.prompt_ids)}, params)
        self._tickets[name] = ticket
        return ticket

    def advance(self) -> list[tuple[int, Sample]]:
        """Sample about a token for each request under way; those that ended by it, in ticket order."""
        ended: list[tuple[int, Sample]] = []
        if not self._tickets:
            return ended
        # vLLM draws from the global stream too, and then takes each row's own draws.
        stream = torch.get_rng_state()
        outputs = self._engine.step()
        torch.set_rng_state(stream)
        for output in outputs:
            if output.finished:
                part = output.outputs[0]
                ids = list(part.token_ids)
                reason = "eos" if part.finish_reason == "stop" else "length"
                sample = Sample(ids, reason, sampled_logprobs(ids, part.logprobs))
                ended.append((self._tickets.pop(output.request_id), sample))
        return sorted(ended, key=lambda pair: pair[0])

    @property
    def num_open(self) -> int:
        """Requests submitted that have not ended."""
        return len(self._tickets)

    def release(self, ticket: int) -> None:
        """Nothing is kept but what vLLM's prefix cache holds, so nothing happens."""

    def close(self) -> None:
        """Give up rows that have not ended."""
        if self._tickets:
            self._engine.abort_request(list(self._tickets))
            self._tickets.clear()


def _chunks(tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[list[tuple[str, Any]]]:
    chunk: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        chunk.append((name, tensor.to(dtype) if tensor.is_floating_point() else tensor))
        if len(chunk) == TENSORS_AT_A_TIME:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
