"""Losses by their names through `train()`: settings reach them, metrics are logged, one of a user's own trains too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import own_loss
import pytest


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a module with a loss."""
    folder = tmp_path / "modules" / "losses_of_mine"
    folder.mkdir(parents=True)
    shutil.copy(own_loss.__file__, folder / "scaled.py")
    monkeypatch.syspath_prepend(folder.parent)
    return "losses_of_mine.scaled"


def test_a_loss_of_ones_own_and_its_settings_train(own: str, train: Any, make_policy: Any, tools: Any) -> None:
    """With SGD a factor of two is a learning rate of two."""
    plain: dict[str, Any] = {"loss_type": own, "optim": "sgd", "max_grad_norm": 0.0, "max_steps": 3}
    twice = train(model=make_policy(), **plain, loss_settings={"factor": 2.0}, learning_rate=0.1)
    faster = train(model=make_policy(), **plain, learning_rate=0.2)
    slower = train(model=make_policy(), **plain, learning_rate=0.1)
    found, expected, other = (tools.weights(trainer.model) for trainer in (twice, faster, slower))
    assert tools.relative(found, expected) < 1e-5 < tools.relative(found, other)


@pytest.mark.quick("dppo_tv", "gmpo")
@pytest.mark.parametrize(
    ("loss_type", "metric"),
    [("dppo_tv", "dppo/masked_mean"), ("dppo_kl", "dppo/masked_mean"), ("gmpo", "gmpo/clipped_mean")],
)
def test_methods_log_what_they_leave_out_or_clip(train: Any, make_policy: Any, loss_type: str, metric: str) -> None:
    """In four steps a batch ratios leave 1; a tight bound leaves tokens out, a wide one none."""
    settings: dict[str, Any] = {"loss_type": loss_type, "num_iterations": 4, "max_steps": 8, "learning_rate": 3e-3}
    name = "clip" if loss_type == "gmpo" else "threshold"
    shares = []
    for bound in (1e-6, 50.0):
        trainer = train(model=make_policy(), **settings, loss_settings={name: bound})
        shares.append([entry[metric] for entry in trainer.state.log_history if metric in entry])
    assert shares[0][0] == 0.0 and max(shares[0]) > 0.1, "on policy nothing has moved"
    assert shares[1] == [0.0] * 8


@pytest.mark.parametrize(("name", "share"), [("clip_cov", 0.25), ("kl_cov", 0.1)])
def test_a_share_of_the_tokens_is_selected_in_each_step(train: Any, make_policy: Any, name: str, share: float) -> None:
    """Also in steps whose policy is not the one that sampled; covariances come from a forward pass there."""
    chosen = {"share": share, **({"low": -100.0, "high": 100.0} if name == "clip_cov" else {})}
    settings: dict[str, Any] = {"loss_type": name, "loss_settings": chosen, "num_iterations": 2, "max_steps": 4}
    trainer = train(model=make_policy(), **settings, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    found = [entry[f"{name}/selected_mean"] for entry in trainer.state.log_history if f"{name}/selected_mean" in entry]
    assert len(found) == 4 and all(0.6 * share < value <= share for value in found)


def test_the_furthest_tokens_are_left_out_of_later_steps(train: Any, make_policy: Any) -> None:
    settings: dict[str, Any] = {"off_policy_mask": "m2po", "num_iterations": 3, "max_steps": 6, "learning_rate": 3e-3}
    shares = []
    for tau in (1e-2, 1e4):
        trainer = train(model=make_policy(), **settings, off_policy_mask_settings={"tau": tau})
        log = [entry for entry in trainer.state.log_history if "off_policy_mask/masked_mean" in entry]
        shares.append([entry["off_policy_mask/masked_mean"] for entry in log])
    assert shares[0][0] == shares[0][3] == 0.0, "on policy nothing has moved"
    assert 0 < shares[0][1] < 1 and 0 < shares[0][4] < 1
    assert shares[1] == [0.0] * 6


def test_a_mask_of_ones_own_trains(
    train: Any, make_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step of a generation batch it leaves out the tokens that have moved."""
    monkeypatch.syspath_prepend(tmp_path)
    source = "from groupgrad.objectives import Mask, PerToken\nMASK = Mask(lambda gap, *_: PerToken(gap.abs() < 1e-3))"
    (tmp_path / "unmoved_tokens.py").write_text(source)
    settings: dict[str, Any] = {"num_iterations": 2, "max_steps": 2, "learning_rate": 3e-3}
    trainer = train(model=make_policy(), off_policy_mask="unmoved_tokens", **settings)
    found = [one["off_policy_mask/masked_mean"] for one in trainer.state.log_history if "grad_norm" in one]
    assert found[0] == 0.0 < found[1]
