"""A run whose reward tests code in a sandbox."""

from __future__ import annotations

from typing import Any

import pytest
import sandbox_escapes
from datasets import Dataset

from groupgrad.rewards import code_reward


@pytest.mark.slow
def test_code_is_tested_as_part_of_a_run(make_trainer: Any) -> None:
    reward = code_reward(tests="checks", extract="all", python=sandbox_escapes.holding("auto"))
    data = Dataset.from_list(
        [{"prompt": f"{a}+1=", "checks": ["assert True", f"assert f({a}) == 0"]} for a in range(2)]
    )
    trainer = make_trainer(train_dataset=data, reward_funcs=reward)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert 0 <= logs["rewards/code_reward/mean"] <= 0.5
    assert logs["code/unusable"] + logs["code/no_code"] + 2 * logs["rewards/code_reward/mean"] == pytest.approx(1)

    with pytest.raises(ValueError, match=r"'?code_reward'?.*'?checks'?"):
        make_trainer(train_dataset=data.remove_columns("checks"), reward_funcs=reward)
