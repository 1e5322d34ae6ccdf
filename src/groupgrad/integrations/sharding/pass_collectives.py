"""Counts the collectives of a sharded model's pass, so that a rank whose pass fails can make the remaining ones.

In a pass all ranks gather the parts of the model and reduce their gradients in the same order. A rank whose memory runs
out has made some of these collectives; the others wait for the rest. It therefore starts a pass over a placeholder
token, in which the collectives that it has made already do nothing. `fsdp_passes.py` and `zero3_passes.py` have what
differs between the ways of sharding.
"""

from __future__ import annotations


class PassCollectives:
    """The collectives of the passes of a sharded model."""

    def __init__(self) -> None:
        self.num_made = 0
        """Number of the pass's collectives so far, skipped ones included."""
        self._num_left_out = 0

    def begin_pass(self) -> None:
        """A pass begins. Not a collective."""
        self.num_made = self._num_left_out = 0

    def begin_rest(self) -> None:
        """After a failed pass: the next pass skips the collectives that the failed one has made. Not a collective."""
        self.num_made, self._num_left_out = 0, self.num_made

    def is_due(self) -> bool:
        """Counts a collective; False if the failed pass has made it already, so that it must be skipped."""
        self.num_made += 1
        return self.num_made > self._num_left_out
