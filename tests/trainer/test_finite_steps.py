"""Steps whose loss or gradient is not finite are skipped, counted and named; several in a row end the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from step_events import At

from groupgrad import GRPOTrainer
from groupgrad.errors import NonFiniteError
from groupgrad.objectives import policy_loss


class Poisoned(GRPOTrainer):
    """A trainer whose loss is multiplied by a number in some steps."""

    bad_steps: dict[int, float]
    """Step -> the factor."""
    detached: bool = False
    """The loss is spoilt without a gradient that shows it."""

    def batch_loss(self, model: Any, batch: Any, **kwargs: Any) -> Any:
        result = super().batch_loss(model, batch, **kwargs)
        factor = self.bad_steps.get(self.state.global_step)
        if factor is None:
            return result
        return type(result)(result.loss + factor if self.detached else result.loss * factor, result.metrics)


@pytest.fixture
def make_poisoned(make_trainer):
    def make(bad_steps: dict[int, float], *, detached: bool = False, **settings: Any) -> Any:
        trainer = make_trainer(cls=Poisoned, **settings)
        trainer.bad_steps, trainer.detached = bad_steps, detached
        return trainer

    return make


@pytest.mark.parametrize(("factor", "detached"), [(float("nan"), True), (float("inf"), False)])
def test_a_step_that_is_not_finite_is_skipped_counted_and_named(make_poisoned, factor, detached, caplog):
    seen: dict[int, list[torch.Tensor]] = {}

    def record(at: Any) -> None:
        seen[at.state.global_step] = [parameter.detach().clone() for parameter in at.model.parameters()]

    callbacks = [At("on_step_end", record)]
    saved = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_poisoned({1: factor}, detached=detached, max_steps=3, trainer={"callbacks": callbacks}, **saved)
    trainer.train()
    assert trainer.state.global_step == 3
    assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[2]))
    assert not all(torch.equal(a, b) for a, b in zip(seen[2], seen[3]))
    logged = [entry.get("nonfinite_steps") for entry in trainer.state.log_history[:3]]
    assert logged == [None, 1.0, 1.0]
    assert "step was skipped" in caplog.text
    resumed = make_poisoned({}, max_steps=3)
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert resumed.finite_steps.num_skipped == 1


class Displaced(GRPOTrainer):
    """A trainer with one log-prob of a batch, of the old policy or of the reference, far from the policy's."""

    field: str
    rises: bool
    """The advantage of the displaced token's row is positive."""
    step: int | None = None
    """The only step that is displaced; None for all."""
    displaced: tuple[int, int] = (-1, -1)

    def batch_loss(self, model: Any, batch: Any, **kwargs: Any) -> Any:
        rows = [row for row in range(batch.num_rows) if (batch.advantages[row] > 0) == self.rises]
        if rows and self.step in (None, self.state.global_step):
            place = int(batch.offsets[rows[0]]) + 1
            values = torch.where(torch.arange(batch.num_tokens) == place, self.far, batch.sampling_logprobs)
            batch = dataclasses.replace(batch, **{self.field: values})
            self.displaced = int(batch.row_index[rows[0]]), int(batch.completion_ids[place])
        return super().batch_loss(model, batch, **kwargs)


def displaced(trainer: Any, field: str, far: float, *, rises: bool, step: int | None = None) -> Any:
    trainer.__class__ = Displaced
    trainer.field, trainer.far, trainer.rises, trainer.step = field, far, rises, step
    return trainer


def test_a_clipped_token_with_an_infinite_ratio_does_not_lose_the_step(make_trainer):
    """e^200, with a positive advantage: the loss is that of the clip, and its gradient 0."""
    trainer = displaced(make_trainer(max_steps=1), "old_logprobs", -200.0, rises=True)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.displaced[0] >= 0
    assert "nonfinite_steps" not in entry
    assert entry["clip_ratio/high_mean"] > 0


@pytest.mark.parametrize(("field", "far", "term"), [("ref_logprobs", 200.0, "kl"), ("old_logprobs", -200.0, "ratio")])
def test_a_term_that_is_infinite_is_named_with_its_token(make_trainer, caplog, capsys, field, far, term):
    trainer = make_trainer(max_steps=3, beta=0.1, disable_tqdm=True)
    displaced(trainer, field, far, rises=False, step=1).train()
    row, token = trainer.displaced
    text = trainer.processing_class.decode([token])
    assert f"step 2: the loss is not finite, since {term} is inf at token 1 ({text!r}) of row {row} (" in caplog.text
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 2")]
    assert len(shown) == 1 and "loss     nan" in shown[0]
    with pytest.raises(NonFiniteError, match=f"since {term} is inf.*bound ratios"):
        displaced(make_trainer(max_steps=3, beta=0.1), field, far, rises=False).train()


class FarReference(GRPOTrainer):
    """A trainer whose reference is far from the policy at the second token of some rows of a step."""

    far_rows: list[int]
    """Places in the step."""
    step_rows: Any

    def _rows_of_step(self, keys: Any) -> Any:
        self.step_rows = super()._rows_of_step(keys)
        batch: Any = self.step_rows
        far = torch.isin(torch.arange(batch.num_tokens), batch.offsets[self.far_rows] + 1)
        return dataclasses.replace(batch, ref_logprobs=torch.where(far, 200.0, batch.ref_logprobs))


@pytest.mark.parametrize("places", [[8], [0, 8]])
def test_rows_of_the_same_number_in_two_generation_batches_are_told_apart(make_trainer, caplog, places):
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "cls": FarReference}
    trainer = make_trainer(max_steps=1, beta=0.1, **settings)
    trainer.far_rows = places
    trainer.train()
    batch, tokenizer = trainer.step_rows, trainer.processing_class
    assert batch.row_index.tolist() == [*range(8)] * 2
    texts = [tokenizer.decode(batch.completion_ids[batch.offsets[row] + 1]) for row in places]
    assert any(f"is inf at token 1 ({text!r}) of row 0 (" in caplog.text for text in texts)
    assert ("; 2 rows have such tokens" in caplog.text) == (len(places) == 2)


def test_rows_without_a_gradient_whose_loss_is_nan_skip_the_step_too(make_trainer, monkeypatch):
    """They stand in micro-batches of their own, after those whose gradients are finite."""

    def one_group_varies(completion_ids, row, **_):
        return [float(len(ids)) if number == row[0] else 0.5 for ids, number in zip(completion_ids, row)]

    def spoilt(*args, **kwargs):
        result = policy_loss(*args, **kwargs)
        spoils = not torch.is_grad_enabled() and trainer.state.global_step == 1
        without_gradient.append(spoils)
        return type(result)(result.loss * torch.nan, result.metrics) if spoils else result

    without_gradient: list[bool] = []
    trainer = make_trainer(reward_funcs=one_group_varies, max_steps=3)
    monkeypatch.setattr("groupgrad.trainer.trainer.policy_loss", spoilt)
    trainer.train()
    assert any(without_gradient)
    assert trainer.finite_steps.num_skipped == 1
    assert trainer.state.global_step == 3


def test_a_skipped_step_leaves_the_optimizers_state_as_it_was(make_poisoned):
    plain, skipped = make_poisoned({}, max_steps=1), make_poisoned({1: float("nan")}, max_steps=2)
    for trainer in (plain, skipped):
        trainer.train()
    for first, second in zip(plain.optimizer.state.values(), skipped.optimizer.state.values()):
        assert torch.equal(first["exp_avg"], second["exp_avg"])
        assert first["step"] == second["step"] == 1
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), skipped.model.parameters()))


def test_the_third_in_a_row_ends_the_run_with_finite_weights(make_poisoned):
    trainer = make_poisoned({1: float("nan"), 2: float("inf"), 3: float("nan")}, max_steps=9)
    with pytest.raises(NonFiniteError, match=r"step 4: .*gradient norm nan.*so were the 2 steps before it.*lower"):
        trainer.train()
    assert trainer.state.global_step == 3
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_steps_that_are_not_in_a_row_do_not_end_it(make_poisoned):
    trainer = make_poisoned({step: float("nan") for step in (0, 1, 3, 4)}, max_steps=6)
    trainer.train()
    assert trainer.state.log_history[5]["nonfinite_steps"] == 4


def spoil(at: Any) -> None:
    with torch.no_grad():
        next(at.model.parameters()).view(-1)[3] = float("nan")


@pytest.mark.parametrize("saves", [True, False])
def test_weights_that_are_not_finite_are_never_saved_and_no_run_ends_well_with_them(make_trainer, saves):
    settings = {"save_strategy": "steps", "save_steps": 1} if saves else {}
    trainer = make_trainer(max_steps=2, trainer={"callbacks": [At("on_step_end", spoil, 2)]}, **settings)
    with pytest.raises(NonFiniteError, match=r"step 2: 1 of \d+ numbers of the model's \S+ are NaN or infinite"):
        trainer.train()
    assert not list(Path(trainer.args.output_dir).glob("checkpoint-2/*.safetensors"))
    with pytest.raises(NonFiniteError, match="not saved"):
        trainer.save_model()
    assert not (Path(trainer.args.output_dir) / "model.safetensors").exists()
