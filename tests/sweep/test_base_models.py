"""Arms that train adapters on a CPU share the base model, which is loaded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from groupgrad.models import load
from groupgrad.models.base_models import BaseModels, separate_trained, shared_base


def frozen(model: nn.Module) -> dict[str, int]:
    """Addresses of the weights that do not train."""
    return {name: p.data_ptr() for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.quick(1)
@pytest.mark.parametrize("given", ["name", "object"])
def test_the_base_is_loaded_once_with_the_bits_of_runs_alone(
    make_sweep: Any, train_alone: Any, arguments: Any, tools: Any, tmp_path: Any, monkeypatch: Any, given: str
):
    from peft import LoraConfig

    if given == "name":
        for part in ("model", "processing_class"):
            arguments[part].save_pretrained(tmp_path / "base")
        arguments |= {"model": str(tmp_path / "base")}
    loads: list[str] = []
    load_policy = load.load_policy
    monkeypatch.setattr(load, "load_policy", lambda *args, **kw: loads.append(args[0]) or load_policy(*args, **kw))
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    sweep = make_sweep({"learning_rate": [1e-2, 3e-2]}, args={"max_steps": 2}, turn_steps=1, peft_config=adapter)
    sweeper = sweep._sweeper
    models = [sweeper.turns.run_of(arm).trainer.model for arm in sweeper.store.arms()]
    assert len(loads) == (given == "name")
    assert frozen(models[0]) == frozen(models[1])
    assert not {p.data_ptr() for p in models[0].parameters() if p.requires_grad} & {
        p.data_ptr() for p in models[1].parameters() if p.requires_grad
    }
    for result in sweep.run() if given == "name" else ():
        train_alone(result.name, {"peft_config": adapter}, max_steps=2, **result.changes)
        folder = tmp_path / "sweep/arms" / result.name
        tools.assert_same(folder, tmp_path / result.name, "adapter_model.safetensors")


def test_an_initialisation_that_changes_the_base_loads_its_own(make_sweep):
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    sweeper = make_sweep({"learning_rate": [1e-2, 3e-2]}, peft_config=adapter)._sweeper
    first, second = (sweeper.turns.run_of(arm).trainer.model for arm in sweeper.store.arms())
    names = [name for name, p in first.named_parameters() if "q_proj.base_layer" in name and not p.requires_grad]
    assert names
    assert all(torch.equal(first.get_parameter(name), second.get_parameter(name)) for name in names)


def test_weights_of_the_base_that_train_are_not_shared():
    models, base = BaseModels(), nn.Linear(2, 2)
    with models.in_use():
        copies = [shared_base(base, None, lambda: base, is_frozen=True) for _ in range(2)]
        copies[0].weight.requires_grad_(False)
        separate_trained(copies[0])
    assert copies[0] is not base
    assert copies[0].weight.data_ptr() == base.weight.data_ptr() == copies[1].weight.data_ptr()
    assert copies[0].bias.data_ptr() != base.bias.data_ptr()
    assert torch.equal(copies[0].bias, base.bias)


def test_tied_weights_stay_tied_in_a_copy():
    base = nn.Module()
    base.first, base.second = nn.Linear(2, 2), nn.Linear(2, 2)
    base.second.weight = base.first.weight
    models = BaseModels()
    with models.in_use():
        copied: Any = shared_base("a name", None, lambda: base, is_frozen=True)
    assert copied.first.weight is copied.second.weight
    assert copied.first.weight is not base.first.weight
