"""Samples rows in a thread, as those of generation batches ahead are."""

from __future__ import annotations

import threading

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.integrations.vllm.vllm_policy import VLLMPolicy


class Sampling(threading.Thread):
    """It has begun when it is made; `samples` are those that have ended, by ticket."""

    def __init__(self, policy: VLLMPolicy, rows: list[Request], options: SamplingOptions):
        super().__init__(daemon=True)
        self.policy, self.rows, self.options, self.error = policy, rows, options, None
        self.samples: dict[int, Sample] = {}
        self.start()

    def run(self) -> None:
        try:
            with self.policy.freeze_weights(), self.policy.session(self.options) as session:
                for row in self.rows:
                    session.submit(row)
                while session.num_open:
                    self.samples.update(session.advance())
        except Exception as error:
            self.error = error

    def result(self) -> list[Sample]:
        """All samples, in the order of the rows."""
        self.join(120.0)
        assert self.error is None, self.error
        return [self.samples[number] for number in range(len(self.rows))]
