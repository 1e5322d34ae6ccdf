"""The colocate engine, against a simulated vLLM that keeps its weights and samples from a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_hybrids import CONFIGS
from transformers import AutoModelForCausalLM

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.integrations.vllm import colocate, weight_sender
from groupgrad.integrations.vllm.colocate import ColocateOptions, VLLMColocateEngine
from groupgrad.types import Media

OPTIONS = SamplingOptions(max_new_tokens=4, eos_ids=(1,))
ROW = Request([5, 6], seed=3, max_new_tokens=4)
SETTINGS = ColocateOptions(max_num_seqs=4, dtype="float32", sleep_mode=True, max_lora_rank=4)


class SimulatedVLLM:
    """Both vLLM's `LLM` and its engine: pushed weights, memory that sleeps, one token a row."""

    def __init__(self) -> None:
        self.llm_engine = self
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.model_config = SimpleNamespace(max_model_len=64, hf_config=SimpleNamespace(image_token_id=9))
        self.input_processor = SimpleNamespace(
            model_config=self.model_config, speculative_config=None, structured_outputs_config="auto", tokenizer="a b"
        )
        self.log: list[str] = []
        self.is_active = False
        """True during an update of weights."""
        self.version = "default"
        self.weights: dict[str, torch.Tensor] = {}
        self.adapters: dict[int, dict[str, torch.Tensor]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.change: Callable[[dict[str, Any]], None] = lambda output: None
        """Called with each output; may modify it."""

    def start_weight_update(self) -> None:
        assert not self.is_active
        self.is_active = True

    def update_weights(self, request: dict[str, Any]) -> None:
        assert "weights asleep" not in self.log[-1:], "a push into memory that sleeps"
        update = request["update_info"]
        if "tensors" in update:
            self.weights.update(update["tensors"])
        elif "checksum" not in update:
            self.is_active = False
            raise RuntimeError("this push is abandoned")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert weight_version is None, "the version is set when all that belongs to it is there"
        self.is_active = False
        self.log.append("pushed")

    def update_weight_version(self, version: str) -> None:
        self.version = version

    def add_lora(self, request: Any) -> bool:
        self.adapters[request.lora_int_id] = load_file(Path(request.lora_path) / "adapter_model.safetensors")
        self.log.append(f"adapter {request.lora_int_id}")
        return True

    def remove_lora(self, number: int) -> bool:
        del self.adapters[number]
        return True

    def reset_prefix_cache(self) -> bool:
        self.log.append("reset prefix")
        return True

    def reset_encoder_cache(self) -> None:
        self.log.append("reset images")

    def sleep(self, level: int) -> None:
        if level == 2:
            self.weights.clear()
        self.log.append("asleep")

    def wake_up(self, tags: list[str]) -> None:
        self.log.append(f"woke {tags[0]}")

    def add_request(self, name: str, prompt: dict[str, Any], params: Any, lora_request: Any) -> None:
        assert self.weights or not SETTINGS.sleep_mode
        self.rows[name] = {"prompt": prompt, "params": params, "adapter": lora_request}

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.rows[name]

    def step(self) -> list[Any]:
        outputs = []
        for name, row in self.rows.items():
            expanded = [token for token in row["prompt"]["prompt_token_ids"] for _ in range(3 if token == 9 else 1)]
            part = SimpleNamespace(token_ids=[1], finish_reason="stop", logprobs=[{1: SimpleNamespace(logprob=-0.5)}])
            part.weight_versions = [SimpleNamespace(version=self.version)]
            output = {"request_id": name, "finished": True, "outputs": [part], "prompt_token_ids": expanded}
            self.change(output)
            outputs.append(SimpleNamespace(**output))
        self.rows.clear()
        return outputs


class Refused(Exception):
    """In place of vLLM's exceptions, which are not ValueErrors."""


class Params(SimpleNamespace):
    """In place of vLLM's `SamplingParams`, which checks a regex when a row is submitted."""

    def verify(self, model: Any, speculative: Any, structured: Any, tokenizer: Any) -> None:
        assert (model.max_model_len, speculative, structured, tokenizer) == (64, None, "auto", "a b")
        if hasattr(self, "structured_outputs") and self.structured_outputs.regex == "[a":
            raise Refused("unclosed character class")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimulatedVLLM:
    """In place of vLLM, with plain records."""
    simulated = SimulatedVLLM()
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.sampling_params", "vllm.lora", "vllm.lora.request")}
    for module in ("vllm", "vllm.sampling_params"):
        modules[module].SamplingParams = Params  # type: ignore[attr-defined]
    modules["vllm.sampling_params"].StructuredOutputsParams = SimpleNamespace  # type: ignore[attr-defined]
    modules["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")  # type: ignore[attr-defined]
    modules["vllm.lora.request"].LoRARequest = lambda name, number, path: SimpleNamespace(  # type: ignore[attr-defined]
        lora_name=name, lora_int_id=number, lora_path=path
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(colocate, "start", lambda folder, options, **_: simulated)
    return simulated


@pytest.fixture
def engine(vllm: SimulatedVLLM, model: Any, tokenizer: Any) -> VLLMColocateEngine:
    return VLLMColocateEngine(model, tokenizer, SETTINGS)


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))


def test_weights_of_the_same_dtype_are_given_by_reference(
    vllm: SimulatedVLLM, engine: VLLMColocateEngine, model: Any
) -> None:
    engine.push(model, 3)
    own = dict(model.named_parameters())
    assert all(vllm.weights[name].data_ptr() == own[name].data_ptr() for name in own)
    assert vllm.log == ["pushed", "reset prefix", "reset images"]
    assert engine.sample([ROW], OPTIONS)[0].ids == [1] and engine.weight_version.startswith("3-")


def test_buckets_are_no_larger_than_the_limit(
    vllm: SimulatedVLLM, engine: VLLMColocateEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    inner = vllm.update_weights

    def counted(request: dict[str, Any]) -> None:
        sizes.append(sum(tensor.nbytes for _, tensor in request["update_info"].get("tensors", ())))
        inner(request)

    monkeypatch.setattr(vllm, "update_weights", counted)
    monkeypatch.setattr(weight_sender, "BUCKET_BYTES", 20_000)
    engine.push(model, 0)
    assert max(sizes) <= 20_000 and sum(sizes) == sum(p.nbytes for p in model.parameters())


def test_an_engine_is_closed_once(vllm: SimulatedVLLM, engine: VLLMColocateEngine) -> None:
    """vLLM's shutdown ends the process groups of the whole process, also those of an engine that was started since."""
    ended: list[int] = []
    vllm.engine_core.shutdown = lambda: ended.append(1)
    engine.close()
    engine.close()
    assert ended == [1]


def test_a_push_that_breaks_off_is_ended_and_the_next_one_begins(
    vllm: SimulatedVLLM, engine: VLLMColocateEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **options: Any) -> Any:
        raise MemoryError("no memory for a bucket")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(weight_sender, "bucket_ranges", broken)
        engine.push(model, 0)
    with pytest.raises(ValueError, match="no whole weights"):
        engine.sample([ROW], OPTIONS)
    engine.push(model, 1)
    assert vllm.log.count("pushed") == 1 and len(engine.sample([ROW], OPTIONS)) == 1


def test_a_merge_leaves_the_policy_alone(vllm: SimulatedVLLM, engine: VLLMColocateEngine, model: Any) -> None:
    policy = adapted(model)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    engine.push(policy, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    name = "model.layers.0.self_attn.q_proj"
    layer = policy.get_base_model().get_submodule(name)
    delta = layer.get_delta_weight("default")
    torch.testing.assert_close(vllm.weights[name + ".weight"], layer.base_layer.weight + delta)


def test_an_adapter_goes_alone_and_the_weights_below_it_once(
    vllm: SimulatedVLLM, engine: VLLMColocateEngine, model: Any
) -> None:
    policy = adapted(model)
    engine.push_adapter(policy, 0)
    engine.push_adapter(policy, 1)
    assert vllm.log.count("pushed") == 1 and list(vllm.adapters) == [2] and engine.weight_version.startswith("1-")
    (tensors,) = vllm.adapters.values()
    assert sorted(tensors) and all(".lora_" in name for name in tensors)
    assert engine.sample([ROW], OPTIONS)[0].logprobs == [-0.5]
    # Merged weights have replaced those below the adapter.
    engine.push(policy, 2)
    assert not vllm.adapters
    engine.push_adapter(policy, 3)
    assert vllm.log.count("pushed") == 3


def test_a_regex_that_vllm_refuses_is_named_before_any_row(vllm: SimulatedVLLM, model: Any, tokenizer: Any) -> None:
    VLLMColocateEngine(model, tokenizer, replace(SETTINGS, regex="[a]")).check(OPTIONS)
    engine = VLLMColocateEngine(model, tokenizer, replace(SETTINGS, regex="[a"))
    with pytest.raises(ValueError, match=r"unclosed character class; .*vllm_structured_outputs_regex='\[a'"):
        engine.check(OPTIONS)


def test_what_slept_samples_from_nothing_older_than_the_policy(
    vllm: SimulatedVLLM, engine: VLLMColocateEngine, model: Any
) -> None:
    engine.push(model, 0)
    engine.sleep()
    engine.sleep()
    assert vllm.log.count("asleep") == 1 and not vllm.weights
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    vllm.log.clear()
    engine.sample([ROW], OPTIONS)
    assert torch.equal(vllm.weights["lm_head.weight"], model.lm_head.weight)
    # The cache is woken only when rows are sampled.
    assert vllm.log == ["woke weights", "pushed", "reset prefix", "reset images", "woke kv_cache"]


@pytest.mark.parametrize(("level", "pushed"), [(1, []), (2, ["pushed"])])
def test_a_push_wakes_what_slept_once(
    level: int, pushed: list[str], vllm: SimulatedVLLM, model: Any, tokenizer: Any
) -> None:
    """At vLLM's level 1 the weights below an adapter come back with `wake_up`; at level 2 they are pushed again."""
    engine, policy = VLLMColocateEngine(model, tokenizer, replace(SETTINGS, sleep_level=level)), adapted(model)
    engine.push_adapter(policy, 0)
    engine.sleep()
    vllm.log.clear()
    engine.push_adapter(policy, 1)
    engine.sample([ROW], OPTIONS)
    engine.sample([ROW], OPTIONS)
    assert vllm.log == ["woke weights", *pushed, "adapter 2", "reset prefix", "reset images", "woke kv_cache"]


def test_a_push_that_fails_leaves_nothing_to_sample_from(
    vllm: SimulatedVLLM, engine: VLLMColocateEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.push(model, 0)
    monkeypatch.setattr(vllm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="did not forget"):
        engine.push(model, 1)
    with pytest.raises(ValueError, match="no whole weights"):
        engine.sample([ROW], OPTIONS)


def _other_weights(output: dict[str, Any]) -> None:
    output["outputs"][0].weight_versions.append(SimpleNamespace(version="1-other"))


@pytest.mark.parametrize(
    ("change", "story"),
    [
        (_other_weights, r"row 0 was sampled from the weights \['0-\w+', '1-other'\], not '0-"),
        # What vLLM gave up has not reached its length.
        (
            lambda output: setattr(output["outputs"][0], "finish_reason", "abort"),
            r"vLLM gave up row 0 \(a prompt of 2 tokens\) .*'abort'",
        ),
    ],
)
def test_a_row_that_is_not_of_these_weights_or_not_whole_is_refused(
    change: Callable[[dict[str, Any]], None], story: str, vllm: SimulatedVLLM, engine: VLLMColocateEngine, model: Any
) -> None:
    engine.push_adapter(adapted(model), 0)
    vllm.change = change
    with pytest.raises(RuntimeError, match=story):
        engine.sample([ROW], OPTIONS)


def test_images_go_along_and_the_prompt_is_the_one_trained_on(
    vllm: SimulatedVLLM, engine: VLLMColocateEngine, model: Any
) -> None:
    engine.push(model, 0)
    media = Media(("a picture",), {}, {}, "key")
    seen: list[Any] = []
    vllm.change = lambda output: seen.append(vllm.rows[output["request_id"]]["prompt"])
    engine.sample([replace(ROW, prompt_ids=[5, 9, 9, 9, 6], media=media)], OPTIONS)
    assert seen == [{"prompt_token_ids": [5, 9, 6], "multi_modal_data": {"image": ["a picture"]}}]
    with pytest.raises(ValueError, match="5 tokens instead of 4, different from token 3 on"):
        engine.sample([replace(ROW, prompt_ids=[5, 9, 9, 6], media=media)], OPTIONS)


def test_vllm_finds_the_policys_config_and_tokenizer_and_is_told_of_recurrent_layers(
    vllm: SimulatedVLLM, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def start(folder: str, options: ColocateOptions, *, is_recurrent: bool) -> SimulatedVLLM:
        told.append((json.loads((Path(folder) / "config.json").read_text())["architectures"], is_recurrent))
        assert (Path(folder) / "tokenizer.json").exists()
        return vllm

    monkeypatch.setattr(colocate, "start", start)
    for policy in (model, AutoModelForCausalLM.from_config(CONFIGS["nemotron_h"]())):
        VLLMColocateEngine(policy, tokenizer, SETTINGS).close()
    assert told == [(["Qwen3ForCausalLM"], False), (["NemotronHForCausalLM"], True)]


def test_what_vllm_does_to_the_policys_classes_is_for_its_own_modules(
    vllm: SimulatedVLLM, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(model.model)
    built: list[Any] = []

    def start(folder: str, options: ColocateOptions, *, is_recurrent: bool) -> SimulatedVLLM:
        old = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            old(self, *args, **kwargs)
            self.vllm_config = "vLLM's"

        kind.__init__ = init
        kind.__call__ = lambda self, *args, **kwargs: f"compiled for {self.vllm_config}"
        built.append(kind(model.config))
        return vllm

    ids = torch.tensor([[4, 5, 6]])
    seen: list[str] = []
    model.model.register_forward_hook(lambda *args: seen.append("hook"))
    expected = model(ids).logits
    monkeypatch.setattr(colocate, "start", start)
    before = kind.__init__
    try:
        VLLMColocateEngine(model, tokenizer, SETTINGS)
        assert torch.equal(model(ids).logits, expected) and seen == ["hook", "hook"]
        assert built[0](ids) == "compiled for vLLM's"
        # A reference model that is built later is not patched.
        assert kind.__init__ is before and not isinstance(kind(model.config)(ids), str)
    finally:
        del kind.__call__
