"""Errors that callers may want to tell apart. All others are ValueError or TypeError.

Every message has the value seen, the reason and the remedy.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration cannot work. The message lists every broken rule, `problems` too."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            lines = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, 1))
            super().__init__(f"{len(problems)} settings cannot work:\n{lines}")


class UnavailableError(ValueError):
    """The feature is not part of this version of groupgrad."""


class RewardError(ValueError):
    """A reward function failed or returned unusable values; the message names function, step and row."""


class RolloutError(ValueError):
    """Rollouts failed: environments raised, or a rollout function returned unusable values."""


class NonFiniteError(RuntimeError):
    """Losses, gradients or weights are NaN or infinite, so training cannot go on and nothing is saved."""


class NoSignalError(RuntimeError):
    """The first generation batches of a run had no group whose rewards differ (`stop_without_signal`)."""


class HangError(RuntimeError):
    """A phase of training has shown no sign of life for longer than `hang_timeout_s`; the message names it."""


class RankError(RuntimeError):
    """Another rank failed, hangs or went away, which ended this one too; the message names it and the cause."""


class OutputDirInUse(RuntimeError):
    """Another run trains in the same folder; the message names its process."""


class WeightsLost(RuntimeError):
    """An engine lost the weights that a request needs, and they cannot be sent again."""


class CheckpointError(ValueError):
    """A checkpoint cannot be resumed from; the message names the file and the way out."""


class CheckpointNotSaved(RuntimeError):
    """The last checkpoint of a run could not be written. All steps were made, and the weights are in memory."""


EXIT_CHECKPOINT_NOT_SAVED = 73
"""Exit status of `groupgrad train` after a `CheckpointNotSaved`, EX_CANTCREAT of sysexits.h."""
