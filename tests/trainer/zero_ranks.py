"""The runs that `test_zero.py` makes on two processes (`torch.distributed.run ... zero_ranks.py OUT KIND`).

KIND is `plain`, for data parallelism, or `zero`, for DeepSpeed. Every rank writes what it ended with to
`OUT/<kind>_<case>_<rank>.pt`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import ranks
import simulated_vllm
from rank_cases import LARGE

from groupgrad.integrations.vllm import setup as vllm_setup
from groupgrad.integrations.vllm.vllm_policy import Push, VLLMPolicy
from groupgrad.integrations.vllm.weight_sender import PolicyWeights, whole_pass

# AdamW blows up rounding in gradients that are almost zero, which all ways of adding them up differ by.
COMMON = {"generation_batch_size": 32, "max_steps": 4, "adam_epsilon": 1e-5}
MEASURED = {"eval": "sets", "eval_steps": 2}
SERVED = {"use_vllm": True, "vllm_max_model_length": 64}
BOUNDED = {**LARGE, "max_steps": 2, "beta": 0.1, "stage": 3}
MEMORY: dict[str, dict[str, Any]] = {
    "cut": {**BOUNDED, "max_tokens_per_pass": 16},
    "by_need": {**BOUNDED, "gradient_checkpointing": None},
    "too_large": BOUNDED,
}

CASES: dict[str, dict[str, Any]] = {
    "stage_1": {**COMMON, **MEASURED, "stage": 1},
    "stage_2": {**COMMON, **MEASURED, "stage": 2, "num_iterations": 2},
    # One evaluation set has one prompt, so that one rank has nothing to measure.
    "whole": {**COMMON, **MEASURED, "stage": 3, "beta": 0.1, "top_entropy_quantile": 0.5},
    "loaded": {**COMMON, **MEASURED, "stage": 3, "beta": 0.1, "num_iterations": 2, "from_disk": True},
    # All parameters are small enough to stay whole between passes.
    "small": {**COMMON, **MEASURED, "stage": 3, "beta": 0.1, "from_disk": True, "persistent": True},
    "flat_groups": {**COMMON, "stage": 3, "reward": ranks.few_vary, "entropy_coef": 0.1, "from_disk": True},
    "checkpointing": {**COMMON, "stage": 3, "gradient_checkpointing": True},
    # A reward model by its name, on texts of which some are longer than it reads.
    "reward_model": {**COMMON, "stage": 3, "reward": "saved", "reward_model_batch_tokens": 20},
    "lora": {**COMMON, "stage": 3, "peft": True, "beta": 0.1, "from_disk": True},
    "served": {**COMMON, **MEASURED, **SERVED, "stage": 3, "beta": 0.1, "from_disk": True},
    "served_lora": {**COMMON, **SERVED, "stage": 3, "peft": True, "from_disk": True},
    "entropy": {**COMMON, **ranks.CASES["entropy"], "stage": 3, "num_iterations": 2},
    **{name: {**COMMON, **ranks.loss_settings(name), "stage": 3} for name in ranks.LOSSES},
    **{name: {**COMMON, **ranks.CASES[name], "stage": 3} for name in ranks.PAIRS},
    "drawn_again": {**COMMON, **ranks.CASES["dynamic_sampling"], **LARGE, "stage": 3},
    "images": {**ranks.CASES["images"], "max_steps": 2, "stage": 3},
    **MEMORY,
    "resumed": {**COMMON, "stage": 3, "save_strategy": "steps", "save_steps": 1, "resume_from": 1, "from_disk": True},
}


FIRST: list[Any] = []
"""The policy of most cases as it was at first."""


class Copy(simulated_vllm.Copy):
    """A copy that reads all shards of what is pushed; the push of step `fails_at` fails halfway."""

    fails_at: int | None = None

    def _push(self, push: Push) -> str:
        own = dict(self.model.named_parameters())
        with whole_pass(PolicyWeights(push.model)) as weights:
            for number, (name, tensor) in enumerate(weights):
                if push.policy_step == self.fails_at and number == 3 and os.environ["RANK"] == "0":
                    raise ConnectionError("the server is gone")
                own[name].copy_(tensor)
        self.pushes.append((push.kind, push.policy_step))
        return push.weight_version


def serve_copies(fails_at: int | None = None) -> None:
    """Replaces the vLLM engine of trainers by a `Copy`."""

    def start(config: Any, model: Any, parts: Any, rollout_components: Any) -> VLLMPolicy:
        engine = Copy(FIRST[-1], parts.tokenizer)
        engine.fails_at = fails_at
        engine.model.generation_config.pad_token_id = engine.model.config.pad_token_id
        sends_adapter = vllm_setup._sends_adapter(config, model, 0, "this engine")
        assert not sends_adapter
        return VLLMPolicy(engine, model)

    vllm_setup.serve_policy = start


def deepspeed_config(stage: int, persistent: bool) -> dict[str, Any]:
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True}
        if not persistent:
            zero["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": zero, **dict.fromkeys(names, "auto")}


def build(name: str, kind: str, out: Path) -> Any:
    settings = dict(CASES[name])
    stage, persistent = settings.pop("stage"), settings.pop("persistent", False)
    settings.pop("resume_from", None)
    if kind == "zero":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # that of the case before, under which transformers would shard a new model
        settings["deepspeed"] = deepspeed_config(stage, persistent)
    if settings.get("reward") == "saved":
        settings["reward"] = str(out / "scorer")
    if settings.pop("from_disk", False):
        settings["model"] = str(out / "model")
    return ranks.build(f"zero_{name}", out / kind, **settings)


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Collective."""
    from groupgrad.integrations.sharding.zero3 import gathered

    with gathered(trainer.model.parameters()):
        return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def run(name: str, kind: str, out: Path) -> dict[str, Any]:
    import oom_ranks

    seen: dict[str, Any] = {}
    if name in MEMORY:
        trainer, seen = oom_ranks.of_a_shared_model(name, lambda: build(name, kind, out))
        if "error" in seen:
            return seen
    else:
        trainer = build(name, kind, out)
        trainer.train()
    found = {**seen, "weights": whole_weights(trainer), "log": ranks.HELP.without_times(trainer.state.log_history)}
    trainer.save_model(str(out / kind / name / "final"))
    if "resume_from" in CASES[name]:
        folder = out / kind / "run" / f"zero_{name}" / f"checkpoint-{CASES[name]['resume_from']}"
        again = build(name, kind, out)
        again.train(str(folder))
        found |= {"again": whole_weights(again), "again_log": ranks.HELP.without_times(again.state.log_history)}
    return found


def failing_push(kind: str, out: Path) -> dict[str, Any]:
    """A later weight update fails on one rank, halfway."""
    serve_copies(fails_at=2)
    try:
        build("served", kind, out).train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def start_deepspeed() -> None:
    """Start DeepSpeed on gloo. Collective."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    # Compiling it takes minutes; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # On GPUs the training arguments see to that.
    deepspeed.init_distributed("gloo")


def main(out: Path, kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "zero":
        start_deepspeed()
    FIRST.append(ranks.first_model())
    if os.environ["RANK"] == "0" and kind == "plain":
        FIRST[-1].save_pretrained(out / "model")
        ranks.make_scorer().save_pretrained(out / "scorer")
        ranks.BASE.make_tokenizer().save_pretrained(out / "scorer")
    serve_copies()
    rank = os.environ["RANK"]
    chosen = sys.argv[3:] or [*CASES, "failing"]
    for name in chosen:
        if name not in ("failing", "too_large"):
            torch.save(run(name, kind, out), out / f"{kind}_{name}_{rank}.pt")
    if kind == "zero" and "failing" in chosen:
        torch.save(failing_push(kind, out), out / f"{kind}_failing_{rank}.pt")
    if kind == "zero" and "too_large" in chosen:
        torch.save(run("too_large", kind, out), out / f"{kind}_too_large_{rank}.pt")
        # Rank 0 waits in gloo until the process of rank 1 ends, and does not wait for long. The shutdown of an
        # interpreter that has loaded DeepSpeed takes seconds where the machine is busy.
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
