"""`groupgrad plan` predicts memory from a configuration alone, and says what fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from base_fixtures import LAYER_PAIR
from tiny_hybrids import CONFIGS, make_hybrid
from transformers import DeepseekV3Config, Qwen3MoeConfig

from groupgrad.apps.cli.main import main
from groupgrad.apps.plan.fitting import choices, recommended, smallest_device
from groupgrad.apps.plan.memory import RunSizes, predict
from groupgrad.apps.plan.shapes import ModelShape, cache_values, model_shape
from groupgrad.engines.native.attention_layouts import ProbeLayout
from groupgrad.engines.native.logits import last_logits
from groupgrad.scoring.forward import ForwardOptions
from groupgrad.scoring.gradient_checkpointing import activation_bytes_per_token

SIZES = RunSizes(prompt=10, completion=100, group=4, rows=8, micro_batch=8, on_gpu=False)


@pytest.fixture
def shape(make_model: Any) -> ModelShape:
    return model_shape("small", make_model().config)


def test_counts_are_those_of_the_model(make_model: Any, shape: ModelShape) -> None:
    assert shape.parameters == make_model().num_parameters() and shape.layers == 2
    assert shape.kv_values == 2 * 2 * 8 * 2  # keys and values, heads, head size, layers
    # Inputs and outputs of q, k, v and o, and of gate, up and down.
    assert shape.largest_saved == (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48)
    assert shape.saved_values == 2 * shape.largest_saved == shape.adapter_inputs and shape.state_bytes == 0


def test_activations_are_about_those_of_a_pass(make_model: Any) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 32}
    one, three = (make_model(num_hidden_layers=n, **sizes).train() for n in (1, 3))
    saved = [activation_bytes_per_token(model, ForwardOptions()) for model in (one, three)]
    assert 4 * model_shape("three", three.config).largest_saved == pytest.approx((saved[1] - saved[0]) / 2, rel=0.3)


STATES = {
    "qwen3_5": 2 * 4 * 8 * 8,
    "qwen3_next": 2 * 4 * 8 * 8,
    "olmo_hybrid": 2 * 2 * 8 * 16,
    "nemotron_h": 2 * 4 * 16 * 8,
    "granitemoehybrid": 2 * 4 * 16 * 8,
    "falcon_h1": 3 * 4 * 16 * 8,
    "bamba": 2 * 4 * 16 * 8,
    "lfm2": 0,
    "mamba2": 3 * 4 * 16 * 8,
}
"""Numbers of the states in the recurrent layers of each of the small hybrids."""


@pytest.mark.quick("lfm2", "nemotron_h", "qwen3_5")
@pytest.mark.parametrize("family", CONFIGS)
def test_a_hybrid_has_keys_in_some_layers_and_states_in_others(family: str) -> None:
    """Keys and values are those that the native engine stores."""
    shape, model, token = model_shape(family, CONFIGS[family]()), make_hybrid(family), torch.zeros(1, dtype=torch.int64)
    probe = ProbeLayout()
    with torch.no_grad():
        last_logits(model, token, token, probe, token)
    assert shape.parameters == model.num_parameters()
    assert shape.kv_values == sum(x.num_heads * (x.key_dim + x.value_dim) for x in probe.layers.values())
    assert shape.state_bytes == 4 * STATES[family]
    memory = predict(shape, SIZES)
    assert memory.keys_values == (8 * 100 + 2 * 10) * shape.kv_values * 4 + (8 + 2) * shape.state_bytes


def test_layers_of_gemma_4_have_their_own_heads(build: Any) -> None:
    """Layers with full attention have wider heads and fewer of them for keys; the last two may share earlier ones'."""
    sizes = {"num_key_value_heads": 2, "num_hidden_layers": 4, "layer_types": LAYER_PAIR * 2}
    model = build("gemma4 (two sizes of heads)", **sizes, vocab_size=512, vocab_size_per_layer_input=512)
    shape = model_shape("gemma4", model.config)
    assert shape.parameters == model.num_parameters()
    # Keys and values of two layers with 2 heads of 8 and of two with 1 head of 16.
    assert shape.kv_values == 2 * 2 * (2 * 8) + 2 * 2 * (1 * 16)
    model = build("gemma4 (shared keys and values)")
    shape = model_shape("gemma4", model.config)
    assert shape.parameters == model.num_parameters() and shape.kv_values == 2 * 8 + 2 * 16


def test_of_experts_the_chosen_ones_save_activations(make_model: Any) -> None:
    """The first two of six layers are dense."""
    sizes = {**make_model().config.to_dict(), "num_hidden_layers": 6, "moe_intermediate_size": 64, "num_experts": 8}
    for name in ("model_type", "layer_types", "architectures"):
        sizes.pop(name, None)
    shape = model_shape("mixed", Qwen3MoeConfig(**sizes, num_experts_per_tok=2, mlp_only_layers=[0, 1]))
    attention, dense = (32 + 32) + 2 * (32 + 16) + (32 + 32), 3 * (32 + 48)
    experts = 2 * ((32 + 2 * 64) + (64 + 32))
    assert shape.saved_values - 6 * attention - 2 * dense in (4 * experts, 4 * (experts + 32 + 8)), "with the router"


def test_keys_and_values_by_kind_of_layer(make_model: Any, build: Any) -> None:
    config = make_model(num_hidden_layers=3, sliding_window=10, use_sliding_window=True).config
    config.layer_types = ["full_attention", "full_attention", "full_attention"]
    assert cache_values(config, 100, latent=True) == 100 * 3 * 2 * 2 * 8
    assert cache_values(config, 100, latent=True, tensor_parallel_size=2) == 100 * 3 * 2 * 1 * 8
    # Each rank has a whole head where there are fewer heads than ranks.
    assert cache_values(config, 100, latent=True, tensor_parallel_size=4) == 100 * 3 * 2 * 1 * 8
    config.layer_types = ["full_attention", "sliding_attention", "linear_attention"]
    assert cache_values(config, 100, latent=True) == (100 + 10) * 2 * 2 * 8
    ranks: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "kv_lora_rank": 5, "qk_rope_head_dim": 4}
    latent = DeepseekV3Config(**ranks, qk_nope_head_dim=6, v_head_dim=8)
    assert cache_values(latent, 100, latent=True) == 100 * 2 * (5 + 4)
    assert cache_values(latent, 100, latent=False) == 100 * 2 * 4 * (6 + 4 + 8)
    # Gemma 4: the first layer has a window of 3 and 2 heads of 8, the second one has 1 head of 16.
    mixed = build("gemma4 (two sizes of heads)", num_key_value_heads=2).config
    assert cache_values(mixed, 100, latent=True) == 3 * 2 * 2 * 8 + 100 * 2 * 1 * 16


def test_parts_by_hand(shape: ModelShape) -> None:
    """Adam holds two float32 numbers a parameter, and each prompt counts once a group."""
    memory, count = predict(shape, SIZES), shape.parameters
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * count, 4 * count, 8 * count)
    assert memory.keys_values == (8 * 100 + 2 * 10) * 64 * 4
    assert memory.peak == max(memory.sampling, memory.training)
    saved = 820 * 4 * (shape.saved_values + 2 * 32)
    assert memory.activations == saved + 4 * shape.head_parameters
    kept = predict(shape, replace(SIZES, checkpointing=True))
    assert kept.activations == 820 * 4 * (4 * 32 + shape.largest_saved) + 4 * shape.head_parameters
    lora = predict(shape, replace(SIZES, adapter="lora"))
    assert lora.activations == saved, "a head that is not trained has no gradient"
    whole = predict(shape, replace(SIZES, accumulates=True))
    assert whole.training == memory.training + min(memory.gradients, memory.activations)
    assert predict(shape, replace(SIZES, reference=True)).reference == memory.weights
    sharded = predict(shape, replace(SIZES, sharding="zero2", devices=4))
    assert (sharded.gradients, sharded.optimizer) == (count, 2 * count)
    lora = predict(shape, replace(SIZES, adapter="lora", lora_rank=2))
    assert lora.optimizer == 8 * 2 * shape.adapter_inputs
    quantized = predict(shape, replace(SIZES, adapter="4bit", lora_rank=2))
    # 4 bits in place of 32, and a float32 scale for each 64 weights.
    assert lora.weights - quantized.weights == shape.linear_parameters * (4 - 0.5 - 4 / 64)


def test_shards_by_hand(shape: ModelShape) -> None:
    """FSDP 2 on 4 devices: a quarter of everything, what is gathered, and for sampling a whole copy."""
    count, layer = shape.parameters, shape.layer_parameters
    outside = count - 2 * layer
    assert outside > 0
    sizes = replace(SIZES, sharding="fsdp2", devices=4)
    memory, whole = predict(shape, sizes), predict(shape, SIZES)
    assert memory.weights == count + 4 * (outside + 2 * layer)
    assert (memory.gradients, memory.optimizer) == (count, 2 * count)
    assert memory.scratch - whole.scratch == 4 * (outside + layer) + 2 * 4 * layer, "gloo reduces in a copy"
    assert memory.sampling - whole.sampling == count - 6 * count
    on_gpu = [predict(shape, replace(chosen, on_gpu=True)) for chosen in (sizes, SIZES)]
    assert on_gpu[0].scratch - on_gpu[1].scratch == 4 * (outside + layer) + 4 * layer
    apart = predict(shape, replace(sizes, samples=False))
    assert (apart.sampled, apart.keys_values, apart.training) == (memory.weights, 0, memory.training)
    half = predict(shape, replace(sizes, half=True))
    assert half.weights == count + 2 * (outside + 2 * layer), "in mixed precision bfloat16 copies are gathered"
    by_layers = predict(shape, replace(sizes, sharding="zero3"))
    assert by_layers.weights == count + 4 * count + count, "the shard, all weights gathered and a float32 shard"
    assert by_layers.sampled == memory.sampled + count


BYTES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({}, {"weights": 2, "gradients": 4, "optimizer": 4}),
    ({"float32_gradients": False}, {"gradients": 2}),
    ({"optimizer": "adamw_8bit"}, {"optimizer": 2}),  # both moments as uint8
    ({"optimizer": "adamw_8bit", "weight_bytes": 4}, {"optimizer": 2}),
    ({"sharding": "zero1", "devices": 2}, {"weights": 2 + 2, "gradients": 2, "update": 1, "optimizer": 4}),
    ({"sharding": "zero2", "devices": 2}, {"weights": 2 + 2, "gradients": 1, "update": 2, "optimizer": 4}),
    ({"sharding": "zero3", "devices": 2}, {"weights": 1 + 2 + 2, "gradients": 1, "update": 0, "optimizer": 4}),
    ({"sharding": "fsdp2", "devices": 2}, {"gradients": 2, "optimizer": 2}),  # halves of 4 bytes
]
"""Settings that differ from a run in bfloat16 on one device, and the bytes of a parameter. DeepSpeed keeps float32
copies, and ZeRO 1 and 2 have whole gradients at first."""


def test_bytes_of_a_parameter_by_hand(shape: ModelShape) -> None:
    for changes, expected in BYTES:
        memory = predict(shape, replace(SIZES, **{"weight_bytes": 2, **changes}))
        found = {name: getattr(memory, name) / shape.parameters for name in expected}
        assert found == expected, changes


def test_buffers_of_zero3(shape: ModelShape) -> None:
    sizes = replace(SIZES, devices=2, on_gpu=True, sharding="zero3")
    count, sharded, plain = shape.parameters, predict(shape, sizes), predict(shape, replace(SIZES, on_gpu=True))
    assert sharded.scratch - plain.scratch == 4 * (5 * 10**8 + count)
    on_cpu = [predict(shape, replace(sizes, on_gpu=False, sharding=sharding)) for sharding in ("zero3", "ddp")]
    assert on_cpu[0].scratch - on_cpu[1].scratch == 4 * (count + count), "of the bucket what is used is resident"


def test_passes_on_a_cpu_are_filled_up_to_a_limit_of_tokens(make_model: Any) -> None:
    """Models of hidden size 256 have passes of 2,048 tokens, and narrower ones of up to 16,384."""
    shape = model_shape("wide", make_model(hidden_size=256).config)

    def tokens(**changes: Any) -> tuple[float, bool]:
        memory = predict(shape, replace(SIZES, **changes))
        per_token = 4 * (shape.saved_values + 2 * 256)
        return (memory.activations - 4 * shape.head_parameters) / per_token, memory.accumulates

    assert tokens() == (820, False)
    assert tokens(completion=256) == (2048, True)
    assert tokens(completion=4000) == (4010, True), "a row is not cut"
    assert tokens(completion=4000, on_gpu=True) == (8 * 4000 + 2 * 10, False)


def test_the_largest_weight_decides_what_an_update_takes(make_model: Any) -> None:
    shape = model_shape("wide", make_model(vocab_size=100_000).config)
    assert shape.largest_parameter == 100_000 * 32
    memory = predict(shape, replace(SIZES, optimizer="adafactor"))
    assert memory.update == 2 * 4 * shape.largest_parameter
    held = memory.context + memory.weights + memory.optimizer
    assert memory.training == held + memory.gradients + memory.update
    assert predict(shape, SIZES).update == 0
    assert predict(shape, replace(SIZES, optimizer="adafactor", adapter="lora")).update == 0


def test_the_choice_fits_and_a_smaller_device_changes_it(shape: ModelShape) -> None:
    roomy = recommended(choices(shape, SIZES, 10**9))
    assert roomy is not None and (roomy.name, roomy.sizes.micro_batch) == ("full", 8)
    least = smallest_device(shape, SIZES)
    assert recommended(choices(shape, SIZES, int(least * 0.999))) is None
    tight = recommended(choices(shape, SIZES, int(least * 1.001)))
    assert tight is not None and tight.sizes.micro_batch == 1 < roomy.sizes.micro_batch
    adapters = replace(SIZES, way="LoRA")
    assert [choice.name for choice in choices(shape, adapters, 10**9)] == ["LoRA"]
    assert smallest_device(shape, replace(SIZES, way="full")) > smallest_device(shape, adapters) >= least


def test_the_command_plans_from_a_configuration_alone(tmp_path: Path, make_model: Any, capsys: Any) -> None:
    make_model().config.save_pretrained(tmp_path)
    flags = ["--model", str(tmp_path), "--completion", "64", "--cpu"]
    assert main(["plan", *flags, "--device", "1GB", "--devices", "4"]) == 0
    shown = capsys.readouterr().out
    assert f"{make_model().num_parameters():,} parameters in 2 layers; 4 x 954 MiB" in shown
    names = ["full", "full, zero1", "full, zero2", "full, zero3", "full, fsdp2", "LoRA", "LoRA, zero3", "LoRA, fsdp2"]
    assert [line.split("  ")[0] for line in shown.splitlines()[3:11]] == names
    settings = "per_device_train_batch_size=16, gradient_accumulation_steps=1, gradient_checkpointing=False."
    assert f"Recommended: full, {settings}" in shown
    make_model(vocab_size=500_000).config.save_pretrained(tmp_path)
    bf16 = [*flags, "--dtype", "bfloat16", "--generation-batch-size", "4096", "--device", "4GB"]
    tables = []
    for further in ([], ["--gradient-dtype", "weights"], ["--use_vllm", "--vllm_mode", "server"]):
        assert main(["plan", *bf16, *further]) == 0
        tables.append(capsys.readouterr().out)
    assert len(set(tables)) == 3, "each flag changes the table"
    make_model().config.save_pretrained(tmp_path)
    assert main(["plan", *flags, "--device", "1MB"]) == 1
    assert "Nothing fits." in capsys.readouterr().out


@pytest.mark.slow
def test_the_file_of_a_run_gives_the_model_and_its_sizes(tmp_path: Path, make_model: Any, capsys: Any) -> None:
    make_model(vocab_size=500_000).config.save_pretrained(tmp_path / "model")
    model, file = str(tmp_path / "model"), tmp_path / "run.yaml"
    settings = {
        "model_name_or_path": model,
        "max_completion_length": 64,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 1024,
        "num_generations": 4,
        "beta": 0.04,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "learning_rate": 1e-5,
    }
    file.write_text(yaml.safe_dump(settings))

    def shown(*flags: str) -> str:
        assert main(["plan", "--device", "4GB", *flags]) == 0
        return capsys.readouterr().out

    flags = ["--accumulation=1", "--completion=64", "--micro-batch=4", "--num-generations=4"]
    flags += ["--generation-batch-size=4096", "--beta=0.04"]
    same = shown("--model", model, *flags, "--cpu")
    assert shown("--config", str(file)) == same
    assert shown("--config", str(file), "--beta", "0") != same
    file.write_text(yaml.safe_dump({**settings, "use_vllm": True, "vllm_mode": "server"}))
    served = ["--use_vllm", "--vllm_mode", "server"]
    assert shown("--config", str(file)) == shown("--model", model, *flags, "--cpu", *served) != same
    assert shown("--config", str(file), "--use_vllm", "false") == same
    file.write_text(yaml.safe_dump({**settings, "steps_per_generation": None, "generation-batch-size": 4096}))
    assert shown("--config", str(file)) == same
    file.write_text(yaml.safe_dump(settings))
    whole = shown("--model", model, *flags, "--micro-batch", "1", "--generation-batch-size", "1024", "--cpu")
    assert shown("--config", str(file), "--micro-batch", "1") == whole != same
    file.write_text(yaml.safe_dump({**settings, "use_peft": True, "use_cpu": False, "bf16": False}))
    adapters = shown("--config", str(file))
    assert "Recommended: LoRA, " in adapters and "full" not in adapters
    file.write_text(yaml.safe_dump({**settings, "optim": "lion_8bit"}))
    assert shown("--config", str(file), "--optim", "adamw") == same


def test_a_file_that_cannot_be_planned_for_is_told_why(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "run.yaml"
    for content, text in (
        ("optim: lion_8bit", "optim='lion_8bit' cannot be planned for; it is none of adamw"),
        ("dtype: auto", "dtype='auto' cannot be planned for; it is none of float32, bfloat16"),
        ("use_cpu: perhaps", "use_cpu='perhaps'"),
        ("max_completion_lenght: 9", "unknown key 'max_completion_lenght'; did you mean max_completion_length?"),
        ("max_completion_length: 0", "max_completion_length=0 is no count; give 1 or more"),
        ("num_generations: 0", "num_generations=0 is no count"),
        ("steps_per_generation: [1]", "steps_per_generation=[1] has a list, and steps_per_generation takes one value"),
        ("- 3", "holds a list, not keys with values"),
        ("beta: 0.1", "no model is given; give --model"),
    ):
        file.write_text(content)
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--device", "1GB", "--config", str(file)])
        assert ended.value.code == 2
        assert text in capsys.readouterr().err
    for words, text in ((["--config"], "expected one argument"), (["--config", "nowhere.yaml"], "No such file")):
        with pytest.raises(SystemExit):
            main(["plan", "--device", "1GB", *words])
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lengths", "mend"),
    [
        (["--prompt", "100", "--completion", "1000"], "lower --completion to 412, or"),
        (["--prompt", "512", "--completion", "1000"], "lower --prompt and --completion, or"),
    ],
)
def test_lengths_beyond_the_context_are_told_with_both_numbers(
    lengths: list[str], mend: str, tmp_path: Path, make_model: Any, capsys: Any
) -> None:
    make_model().config.save_pretrained(tmp_path)
    flags = ["plan", "--model", str(tmp_path), "--device", "8GB", "--cpu"]
    assert main([*flags, *lengths]) == 0
    shown = capsys.readouterr().out
    assert "a completion of 1,000 tokens do not fit into the model's context of 512 positions" in shown
    assert mend in shown and "Recommended: full" in shown
    assert main([*flags, "--prompt", "100", "--completion", "412"]) == 0
    assert "context" not in capsys.readouterr().out


def test_a_plan_for_a_cpu_takes_the_memory_of_this_machine(tmp_path: Path, make_model: Any, capsys: Any) -> None:
    make_model().config.save_pretrained(tmp_path)
    flags = ["plan", "--model", str(tmp_path), "--completion", "16"]
    assert main([*flags, "--cpu"]) == 0
    unsaid = capsys.readouterr().out
    assert main([*flags, "--cpu", "--device", f"{psutil.virtual_memory().total}B"]) == 0
    assert capsys.readouterr().out == unsaid
    with pytest.raises(SystemExit):
        main(flags)
    assert "give --device, such as --device 80GB" in capsys.readouterr().err


def test_mistakes_end_with_a_sentence(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "recurrent_gemma", "num_hidden_layers": 2}))
    (tmp_path / "unknown.json").write_text(json.dumps({"model_type": "not_of_transformers"}))
    for argv, text in (
        (["--model", str(tmp_path / "nowhere"), "--device", "8GB"], "there is no such folder; give a folder with"),
        (
            ["--model", str(tmp_path / "unknown.json"), "--device", "8GB"],
            "`not_of_transformers` but Transformers does not recognize this architecture; give a folder with",
        ),
        (["--model", str(tmp_path), "--device", "8GB"], "layers of a kind that is not predicted, or"),
        (["--model", str(tmp_path), "--device", "8"], "8 is no size; write it as 80GB or 24GiB"),
        (["--model", "x", "--device", "8GB", "--beta", "none"], "invalid float value: 'none'"),
        (["--model", str(tmp_path), "--device", "8GB", "--completions", "9"], "did you mean --completion?"),
        (
            ["--model", str(tmp_path), "--device", "8GB", "--devices", "2", "--context-parallel-size", "2"],
            "context_parallel_size=2 cannot be planned for; plan one device with that part of a completion",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            raise SystemExit(main(["plan", *argv]))
        assert ended.value.code == 2
        assert text in re.sub(r"\s+", " ", capsys.readouterr().err)
