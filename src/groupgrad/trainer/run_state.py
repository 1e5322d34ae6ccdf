"""The state that a run carries besides weights, optimizer, schedule and random streams: `RunState`, and parts of it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerCallback

from groupgrad import dist
from groupgrad.metrics import Metric, latest
from groupgrad.objectives import applied_entropy_coef, next_entropy_coef

logger = logging.getLogger(__name__)


_SHARED_FILE = "groupgrad_state_shared.pt"


class Shared(Protocol):
    """State that steps depend on and that is the same on all ranks; a checkpoint stores it once."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


class Stateful(Shared, Protocol):
    """State that steps depend on and that differs between ranks; a checkpoint stores it for each rank."""

    def join_states(self, states: Any) -> Mapping[str, Any] | None:
        """Makes this rank's state from `states`, saved by another number of ranks; None to start anew."""
        ...


class SameOnRanks:
    """Mixin for a `Stateful` whose state is the same on all ranks, so that any saved state will do."""

    def join_states(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The state of any rank."""
        return states[0]


class RunState:
    """All of a run's state beyond weights, optimizer, scheduler and global random streams.

    `parts` are each rank's own, one file a rank; `shared` are the same on all ranks, written once.
    """

    def __init__(self, parts: Mapping[str, Stateful], *, shared: Mapping[str, Shared] | None = None):
        self._parts, self._shared = dict(parts), dict(shared or {})

    def save(self, folder: str | Path) -> None:
        """Writes this rank's file into a checkpoint folder, and on the main process what all share."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        states = {name: part.state_dict() for name, part in self._parts.items()}
        torch.save(states, self._path(folder, dist.rank()))
        if self._shared and dist.is_main():
            shared = {name: part.state_dict() for name, part in self._shared.items()}
            torch.save(shared, Path(folder) / _SHARED_FILE)

    def load(self, folder: str | Path, *, world_size: int | None = None, without: Collection[str] = ()) -> bool:
        """Collective. Restores from a checkpoint folder; False, and a warning, if it lacks the state of some rank.

        Then no rank restores: one that held its generation batch would not join the others when they sample anew.
        `world_size` processes wrote the checkpoint, by default as many as run now. If they are others, a part is
        restored from the states of all of them by its `join_states`. Files named in `without` count as missing.
        """
        then = dist.world_size() if world_size is None else world_size
        ranks = [dist.rank()] if then == dist.world_size() else range(then)
        paths = [self._path(folder, rank) for rank in ranks]
        shared = [Path(folder) / _SHARED_FILE] if self._shared else []
        absent = next((p.name for p in [*paths, *shared] if not p.is_file() or p.name in without), "")
        missing = sorted({name for name in dist.all_gather_objects(absent) if name})
        if missing:
            if dist.is_main():
                logger.warning(
                    "%s holds weights without the state of the run (%s is missing): %s start anew, so the run goes on, "
                    "but not as it would have without the break",
                    folder,
                    ", ".join(missing),
                    ", ".join([*self._parts, *self._shared]),
                )
            return False
        states = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
        anew: list[str] = []
        for name, part in self._parts.items():
            found = [state[name] for state in states if name in state]
            if not found:
                continue
            state = found[0] if then == dist.world_size() else part.join_states(found)
            if state is None:
                anew.append(name)
            else:
                part.load_state_dict(state)
        if anew and dist.is_main():
            logger.warning(
                "%d processes wrote %s and %d resume: %s start anew", then, folder, dist.world_size(), ", ".join(anew)
            )
        for path in shared:
            state = torch.load(path, map_location="cpu", weights_only=True)
            for name, part in self._shared.items():
                if name in state:
                    part.load_state_dict(state[name])
        return True

    @staticmethod
    def _path(folder: str | Path, rank: int) -> Path:
        return Path(folder) / f"groupgrad_state_{rank}.pt"


class EntropyController(SameOnRanks):
    """The weight of the entropy bonus: fixed, or steered towards a target entropy (arXiv:2505.22312)."""

    def __init__(self, coef: float, *, adaptive: bool, target: float, delta: float, minimum: float, maximum: float):
        self.coef, self.adaptive, self.target = coef, adaptive, target
        self._delta, self._minimum, self._maximum = delta, minimum, maximum
        self._last_entropy: float | None = None
        self.is_active = adaptive or coef != 0.0
        """True if a bonus may be applied in this run."""
        self.applied = 0.0 if adaptive else coef
        """The coefficient of the present optimizer step."""

    def end_step(self, entropy: Metric | None) -> dict[str, Metric]:
        """Moves the coefficient by the step's mean entropy on this rank (with its token count), and gives the metric.

        Collective if adaptive.
        """
        metrics = {"entropy_coef": latest(self.coef)}
        if self.adaptive and entropy is not None:
            total, count = dist.all_sum([float(entropy.value), float(entropy.weight)])
            self._last_entropy = total / count if count else None
            self.coef = next_entropy_coef(
                self.coef,
                total / count if count else float("nan"),
                target=self.target,
                delta=self._delta,
                minimum=self._minimum,
                maximum=self._maximum,
            )
            self.applied = applied_entropy_coef(self.coef, self._last_entropy, target=self.target)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Coefficient and last entropy."""
        return {"coef": self.coef, "last_entropy": self._last_entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken; a fixed coefficient stays the configured one."""
        if self.adaptive:
            self.coef, self._last_entropy = state["coef"], state["last_entropy"]
            self.applied = applied_entropy_coef(self.coef, self._last_entropy, target=self.target)


class LossWindow(TrainerCallback):
    """The loss since the last log event, which `transformers.Trainer` keeps for its logs but leaves out of checkpoints.

    Without it a log event whose steps lie on both sides of a checkpoint would show the mean of the later ones alone.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """This rank's sum, and the step of the last log event."""
        return {"loss": float(self._trainer._tr_loss), "logged_at": self._trainer._globalstep_last_logged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps the saved sum; training goes on with it when it begins."""
        self._loaded = state

    def join_states(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The mean sum of all ranks, which a log event would have shown."""
        return {**states[0], "loss": sum(state["loss"] for state in states) / len(states)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restores a loaded sum into the loop's sum, which the loop has just set to 0. Collective after a resume."""
        if self._loaded is None:
            return
        self._trainer._tr_loss.fill_(self._loaded["loss"])
        self._trainer._globalstep_last_logged = self._loaded["logged_at"]
        # The mean loss that training returns is over the steps of this call alone, and of all ranks.
        self._trainer._total_loss_scalar -= dist.all_sum([self._loaded["loss"]])[0] / dist.world_size()
        self._loaded = None
