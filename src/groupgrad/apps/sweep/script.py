"""`groupgrad.Sweep`: a sweep that a Python script describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle

from groupgrad.apps.sweep.factory import ScriptArms
from groupgrad.apps.sweep.report import Result, results
from groupgrad.apps.sweep.sweep_plan import read_plan
from groupgrad.apps.sweep.sweeper import Sweeper
from groupgrad.trainer import GRPOTrainer


class Sweep:
    """Trains many configurations in turns, each as if it were trained alone.

    ```python
    from groupgrad import Sweep

    sweep = Sweep(
        "runs/rates",
        vary={"learning_rate": [1e-6, 3e-6, 1e-5], "loss_type": ["grpo", "dapo"]},
        halving=True,
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args={"max_steps": 200},
        train_dataset=dataset,
    )
    best = sweep.run()[0]
    ```

    Args:
        output_dir: the folder of the sweep; a sweep that was interrupted goes on when it is made again there.
        vary: fields of `GRPOConfig` and their values, a list or `{"range": [low, high], "num": 4, "scale": "log"}`;
            `peft_config.r` for a field of the adapter's configuration; for another argument of `GRPOTrainer`, such as
            `reward_funcs`, a mapping of names to values.
        args: the fields of `GRPOConfig` that all arms begin with.
        arms: single arms beside those of `vary`, each a mapping of what it changes.
        sample: "grid" or `{"random": 16}`.
        halving: True or a mapping for successive halving; None trains all arms to their end.
        metric: what arms are compared by, "reward" or the name of a reward function.
        turn_steps: steps of an arm's turn; None chooses them by the cost of switching.
        devices: "all", a number, or a list of GPUs: a worker process for each trains arms, to which the arguments are
            sent; on a CPU a number of processes. None trains all arms in this process.
        trainer_arguments: the other arguments of `GRPOTrainer`.

    Raises:
        ValueError: if some arm cannot work, before anything is trained.
    """

    def __init__(
        self,
        output_dir: str | Path,
        vary: Mapping[str, Any] | None = None,
        *,
        args: Mapping[str, Any] | None = None,
        arms: Sequence[Mapping[str, Any]] = (),
        sample: Any = "grid",
        halving: Any = None,
        metric: str = "reward",
        turn_steps: int | None = None,
        devices: str | int | Sequence[int] | None = None,
        **trainer_arguments: Any,
    ):
        if not isinstance(args or {}, Mapping):
            raise TypeError(
                f"args is a {type(args).__name__}; a sweep needs the fields of GRPOConfig as a dict, to change them"
            )
        mappings = {name: dict(given) for name, given in (vary or {}).items() if isinstance(given, Mapping)}
        labelled = {name: given for name, given in mappings.items() if "range" not in given}
        content = {
            "vary": {name: list(given) if name in labelled else given for name, given in (vary or {}).items()},
            "arms": list(arms),
            "sample": sample,
            "halving": halving,
            "metric": metric,
            "turn_steps": turn_steps,
            "devices": devices,
        }
        plan = read_plan(content, args or {})
        factory = ScriptArms(trainer_arguments, labelled)
        if devices is not None:
            cloudpickle.dumps(factory)  # what cannot be sent to a worker fails before the sweep has a folder
        self._sweeper = Sweeper(plan, output_dir, factory)
        self._sweeper.prepare({**content, "base": {name: str(value) for name, value in (args or {}).items()}})

    def trainer_of(self, arm: int | str, output_dir: str | Path | None = None) -> GRPOTrainer:
        """Makes a new trainer of an arm, as if it were to train the arm alone, for example for a replay.

        Args:
            arm: the number or the name of an arm.
            output_dir: the folder of the trainer's run; None takes a temporary one, which only a replay may use.

        Raises:
            ValueError: if the sweep has no such arm.
        """
        found = self._sweeper.store.find(str(arm))
        if output_dir is not None:
            return self._sweeper.turns.trainer_of(found, Path(output_dir))
        with TemporaryDirectory(prefix="groupgrad-") as folder:
            return self._sweeper.turns.trainer_of(found, Path(folder))

    @property
    def folder(self) -> Path:
        """The folder of the sweep."""
        return self._sweeper.store.folder

    def run(self) -> list[Result]:
        """Trains until no arm has steps to make; the arms, the best one first."""
        self._sweeper.run()
        return results(self._sweeper.store)
