"""The client of a vLLM server, against a scripted server."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
import urllib.parse
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from groupgrad.engines.base import Request, SamplingOptions, sample_all
from groupgrad.errors import WeightsLost
from groupgrad.integrations.sharding.fsdp import FSDPOptions, is_fully_sharded, shard
from groupgrad.integrations.vllm.client import incompatibilities
from groupgrad.integrations.vllm.http import Address, ServerRefused, ServerTimeout, ServerUnreachable, call
from groupgrad.integrations.vllm.media import decode
from groupgrad.integrations.vllm.server_pool import VLLMServerPool
from groupgrad.integrations.vllm.vllm_policy import VLLMPolicy
from groupgrad.integrations.vllm.wire import PROTOCOL, model_sizes, specs_from_json, unpack
from groupgrad.types import Media

OPTIONS = SamplingOptions(max_new_tokens=4, eos_ids=(1,))
ROWS = [Request([5, 6], seed=3, max_new_tokens=4), Request([5, 6], seed=4, max_new_tokens=4)]


class Scripted:
    """A server that keeps pushed weights, and answers `generate` with the lines of `script`."""

    def __init__(self, model: Any):
        sizes = {**model_sizes(model.config), "architecture": type(model).__name__}
        self.info: dict[str, Any] = {
            "start_id": "first",
            "protocol": PROTOCOL,
            "release": "1.0",
            "model": "m",
            "sizes": sizes,
            "vocab_size": 92,
            "base_version": "x",
            "next_push": "0",
            "num_workers": 1,
        }
        self.info |= {"dtype": "bfloat16", "max_model_len": 64, "max_lora_rank": 0, "complete": True}
        self.info |= {"weight_version": "as loaded", "pending_version": None}
        self.script: list[list[dict[str, Any]]] = []
        self.calls: list[dict[str, Any]] = []
        self.specs: list[Any] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.checksum = 0
        scripted = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*scripted.info_answer())

            def do_POST(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                data = self.rfile.read(int(self.headers["Content-Length"]))
                name = url.path.removeprefix("/groupgrad/")
                self._answer(*getattr(scripted, name)(data, dict(urllib.parse.parse_qsl(url.query))))

            def _answer(self, status: int, answer: Any) -> None:
                lines = answer if isinstance(answer, (list, Iterator)) else [answer]
                self.send_response(status)
                self.end_headers()
                for line in lines:
                    self.wfile.write(json.dumps(line).encode() + b"\n")
                    self.wfile.flush()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def engine(self, **options: Any) -> VLLMServerPool:
        address = Address.of(port=self.server.server_port)
        return VLLMServerPool([address], **{"timeout_s": 2.0, "bucket_bytes": 5_000, **options})

    def info_answer(self) -> tuple[int, Any]:
        return 200, self.info

    def check(self, data: bytes, query: dict[str, str]) -> tuple[int, Any]:
        return 200, {}

    def init(self, data: bytes, query: dict[str, str]) -> tuple[int, Any]:
        if json.loads(data):
            return 500, {"error": "this worker does not see the trainer's shared memory"}
        return 200, {}

    def start(self, data: bytes, query: dict[str, str]) -> tuple[int, Any]:
        self.specs, self.checksum = specs_from_json(json.loads(data)["tensors"]), 0
        return 200, {}

    def update(self, data: bytes, query: dict[str, str]) -> tuple[int, Any]:
        first = int(query["first"])
        own, tensor = (
            self.specs[first : first + int(query["count"])],
            torch.frombuffer(bytearray(data), dtype=torch.uint8),
        )
        self.weights.update(unpack(own, tensor))
        self.checksum = zlib.crc32(data, self.checksum)
        return 200, {}

    def finish(self, data: bytes, query: dict[str, str]) -> tuple[int, Any]:
        body = json.loads(data)
        if body["checksum"] != self.checksum:
            return 422, {"error": "another checksum"}
        self.info |= {"weight_version": body["weight_version"], "complete": True}
        return 200, {}

    def generate(self, data: bytes, query: dict[str, str]) -> tuple[int, Any]:
        self.calls.append(json.loads(data))
        version = self.calls[-1]["weight_version"]
        lines = [{"weight_versions": [[version, len(line.get("ids", ()))]], **line} for line in self.script.pop(0)]
        return 200, lines


@pytest.fixture
def scripted(model: Any) -> Iterator[Scripted]:
    scripted = Scripted(model)
    yield scripted
    scripted.server.shutdown()
    scripted.server.server_close()


def test_a_regex_that_the_server_refuses_is_named_before_any_row(scripted: Scripted, model: Any) -> None:
    story = "vLLM 0.32.0 refuses the sampling options: unclosed character class"
    scripted.check = lambda data, query: (400, {"error": story})  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"unclosed character class; .*vllm_structured_outputs_regex='\[a'"):
        scripted.engine(regex="[a").connect(model, options=OPTIONS)
    with pytest.raises(ValueError, match=r"see generation_kwargs$"):
        scripted.engine().connect(model, options=OPTIONS)


def row(number: int, ids: list[int], reason: str = "length") -> dict[str, Any]:
    return {"row": number, "ids": ids, "logprobs": [-1.0] * len(ids), "finish_reason": reason}


def test_a_push_brings_all_weights_in_the_servers_dtype(scripted: Scripted, model: Any) -> None:
    weight_version = scripted.engine().push(model, 7)
    assert weight_version.startswith("7-") and scripted.info["weight_version"] == weight_version
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    assert set(scripted.weights) == set(expected)
    assert all(torch.equal(scripted.weights[name], expected[name]) for name in expected)


def test_rows_come_in_any_order_and_share_their_prompt(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    engine.push(model, 0)
    scripted.script = [[{"num_tokens": 3}, row(1, [8, 1], "stop"), row(0, [9, 9, 9, 9])]]

    first, second = engine.sample(ROWS, OPTIONS)

    assert (first.ids, first.finish_reason) == ([9, 9, 9, 9], "length")
    assert (second.ids, second.finish_reason, second.logprobs) == ([8, 1], "eos", [-1.0, -1.0])
    (body,) = scripted.calls
    assert body["prompts"] == [[5, 6]] and body["weight_version"] == engine.weight_version
    assert body["rows"] == [
        {"row": 0, "prompt": 0, "seed": 3, "max_tokens": 4},
        {"row": 1, "prompt": 0, "seed": 4, "max_tokens": 4},
    ]


def test_images_travel_once_however_many_rows_and_turns_need_them(scripted: Scripted, model: Any) -> None:
    image_module = pytest.importorskip("PIL.Image")
    engine = scripted.engine()
    engine.push(model, 0)
    images = tuple(image_module.new("RGB", (3, 2), color) for color in ("red", "blue", "green"))
    two, one = Media(images[:2], {}, {}, "two"), Media(images[2:], {}, {}, "one")
    with_images = [*(replace(item, media=two) for item in ROWS), replace(ROWS[0], media=one), ROWS[0]]
    scripted.script = [[row(number, [9]) for number in range(4)]]
    engine.sample(with_images, OPTIONS)
    (body,) = scripted.calls
    assert body["prompts"] == [[5, 6]] and [item.get("images") for item in body["rows"]] == ["two", "two", "one", None]
    decoded = {key: [decode(text).tobytes() for text in texts] for key, texts in body["images"].items()}
    assert decoded == {media.key: [image.tobytes() for image in media.images] for media in (two, one)}


def test_rows_that_an_answer_left_out_are_asked_for_again(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    engine.push(model, 0)
    scripted.script = [[row(1, [8])], [row(0, [9])]]
    assert [sample.ids for sample in engine.sample(ROWS, OPTIONS)] == [[9], [8]]
    assert [item["row"] for item in scripted.calls[1]["rows"]] == [0]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_rows_that_the_server_gave_up_are_asked_for_again(reason: str, scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    engine.push(model, 0)
    scripted.script = [[row(0, [9], reason), row(1, [8], "stop")], [row(0, [9, 7])]]
    samples = engine.sample(ROWS, OPTIONS)
    assert [(sample.ids, sample.finish_reason) for sample in samples] == [([9, 7], "length"), ([8], "eos")]


def test_a_server_that_was_started_again_is_given_the_weights(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    weight_version = engine.push(model, 3)
    scripted.script = [[], [row(0, [9]), row(1, [8])]]
    scripted.weights.clear()
    scripted.info |= {"start_id": "second", "weight_version": "as loaded"}
    engine.sample(ROWS, OPTIONS)
    assert scripted.info["weight_version"] == weight_version == engine.weight_version and len(scripted.weights) == len(
        model.state_dict()
    )


def test_a_push_sees_that_the_server_was_started_again_in_another_dtype(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    engine.push(model, 3)
    scripted.info |= {"start_id": "second", "weight_version": "as loaded", "dtype": "float32"}
    weight_version = engine.push(model, 4)
    assert scripted.info["weight_version"] == weight_version and engine.info["start_id"] == "second"
    assert {tensor.dtype for tensor in scripted.weights.values()} == {torch.float32}


def test_a_rank_that_cannot_push_says_that_the_weights_are_lost(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine(pushes=False, timeout_s=0.5)
    engine.connect(model)
    scripted.info |= {"weight_version": "3-here"}
    engine.expect("3-here")
    scripted.info |= {"start_id": "second", "weight_version": "as loaded"}
    scripted.script = [[]]
    with pytest.raises(
        WeightsLost, match="no vLLM server has the weights '3-here' any more, and the rank that pushes has not"
    ):
        engine.sample(ROWS, OPTIONS)


def test_nobody_waits_for_a_server_when_training_ends(scripted: Scripted, model: Any) -> None:
    policy = VLLMPolicy(scripted.engine(timeout_s=60.0), model)
    policy.refresh(0)
    with policy.session(OPTIONS) as session:
        scripted.server.shutdown()
        scripted.server.server_close()
        started = time.monotonic()
        threading.Timer(0.3, policy.stop).start()
        with policy.freeze_weights(), pytest.raises(RuntimeError, match="given up, since training ends"):
            sample_all(session, ROWS)
    assert time.monotonic() - started < 30


def test_nobody_waits_for_the_rank_that_pushes_when_training_ends(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine(pushes=False, timeout_s=5.0)
    engine.connect(model)
    engine.expect("3-here")
    scripted.info |= {"start_id": "second"}
    scripted.script = [[]]
    threading.Timer(0.6, setattr, (engine, "is_stopped", True)).start()
    with pytest.raises(RuntimeError, match="given up, since training ends"):
        engine.sample(ROWS, OPTIONS)


def test_a_push_of_ours_that_did_not_end_is_made_again(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    weight_version = engine.push(model, 3)
    scripted.info |= {"complete": False, "weight_version": "2-before", "pending_version": weight_version}
    scripted.script = [[], [row(0, [9]), row(1, [8])]]
    scripted.weights.clear()
    engine.sample(ROWS, OPTIONS)
    assert scripted.info["weight_version"] == weight_version and len(scripted.weights) == len(model.state_dict())


def test_a_server_that_another_trainer_pushes_to_is_left_alone(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    engine.push(model, 3)
    scripted.info |= {"complete": False, "pending_version": "9-other"}
    scripted.script = [[]]
    with pytest.raises(RuntimeError, match=r"has the weights '9-other', .* another trainer uses the same server"):
        engine.sample(ROWS, OPTIONS)


def test_a_server_that_fails_again_and_again_is_given_up(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    engine.push(model, 0)
    scripted.script = [[] for _ in range(9)]
    with pytest.raises(
        ConnectionError,
        match=r"again and again .*its answer ended before all rows had; rows that have not ended: 0 \(prompt of 2 tok",
    ):
        engine.sample(ROWS, OPTIONS)
    assert len(scripted.calls) == 4


def test_rows_that_hang_with_all_of_the_server_are_named(scripted: Scripted, model: Any) -> None:
    """It ends one row, and from then on accepts calls and answers none, not even `info`."""
    engine = scripted.engine(timeout_s=1.0)
    engine.push(model, 0)
    ended = threading.Event()

    def hang(*call: Any) -> tuple[int, Any]:
        ended.wait(30.0)
        return 200, {}

    scripted.script = [[row(0, [9])]]
    first = scripted.generate

    def generate(*call: Any) -> tuple[int, Any]:
        if scripted.script:
            return first(*call)
        scripted.info_answer = hang  # type: ignore[method-assign]
        return hang()

    scripted.generate = generate  # type: ignore[method-assign]
    try:
        with pytest.raises(
            ConnectionError, match=r"no vLLM server .*/generate within 1 s; .*rows .*: 1 \(prompt of 2 "
        ):
            engine.sample(ROWS, OPTIONS)
    finally:
        ended.set()


def test_rows_that_hang_while_the_server_answers_are_named(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine(timeout_s=1.0)
    engine.push(model, 0)
    ended = threading.Event()

    def heartbeats() -> Iterator[dict[str, Any]]:
        while not ended.wait(0.05):
            yield {"num_tokens": 0}

    scripted.generate = lambda *call: (200, heartbeats())  # type: ignore[method-assign]
    try:
        with pytest.raises(TimeoutError, match=r"sampled no token for 1 s; rows .*: 0 .*workers hang"):
            engine.sample(ROWS, OPTIONS)
    finally:
        ended.set()


@pytest.mark.parametrize(
    ("info", "theirs"),
    [
        ({"protocol": PROTOCOL + 1, "release": "9.0"}, f"speaks protocol {PROTOCOL + 1} .groupgrad 9.0."),
        ({"protocol": None, "release": None}, "speaks protocol none .groupgrad of an older release."),
    ],
)
def test_a_server_of_another_release_is_refused(
    scripted: Scripted, model: Any, info: dict[str, Any], theirs: str
) -> None:
    scripted.info |= info
    scripted.info = {name: value for name, value in scripted.info.items() if value is not None}
    with pytest.raises(ValueError, match=f"{theirs}, and this trainer speaks protocol {PROTOCOL} .*start the server"):
        scripted.engine().connect(model)


@pytest.mark.parametrize("backend", ["nccl", None])
def test_a_server_with_another_backend_of_weight_transfer_is_refused(
    scripted: Scripted, model: Any, backend: str | None
) -> None:
    scripted.info |= {"backend": backend}
    with pytest.raises(
        ValueError, match=rf"by the backend {backend!r}, .*--weight-transfer-config '.*\"groupgrad\"}}'"
    ):
        scripted.engine().connect(model)


def test_rows_of_other_weights_are_refused(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    engine.push(model, 0)
    scripted.script = [[{**row(0, [9]), "weight_versions": [[engine.weight_version, 0], ["0-other", 1]]}]]
    story = "row 0 was sampled from the weights '0-.*' and '0-other', not '0-"
    with pytest.raises(RuntimeError, match=story):
        engine.sample(ROWS, OPTIONS)


def test_rows_of_weights_before_the_sessions_own_are_refused(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    first = engine.push(model, 0)
    engine.push(model, 1)
    scripted.script = [[{**row(0, [9]), "weight_versions": [[first, 1]]}]]
    with pytest.raises(RuntimeError, match=f"row 0 was sampled from the weights '{first}', not '1-"):
        engine.sample(ROWS, OPTIONS)


def test_a_row_that_fails_is_named(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    engine.push(model, 0)
    scripted.script = [[row(0, [9]), {"row": 1, "error": "ValueError: too long"}]]
    with pytest.raises(ValueError, match=r"row 1 \(a prompt of 2 tokens\): ValueError: too long"):
        engine.sample(ROWS, OPTIONS)


def test_a_push_that_is_refused_says_both_sides(scripted: Scripted, model: Any) -> None:
    engine = scripted.engine()
    engine.connect(model)
    scripted.finish = lambda data, query: (422, {"error": "nothing was sent for x"})  # type: ignore[method-assign]
    with pytest.raises(ServerRefused, match=r"pushing version 5 to http://.* failed: nothing was sent for x"):
        engine.push(model, 5)


def test_a_server_that_runs_out_of_memory_in_a_push_is_an_error_with_the_remedy(scripted: Scripted, model: Any) -> None:
    story = "RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB'"
    scripted.update = lambda data, query: (500, {"error": story})  # type: ignore[method-assign]
    with pytest.raises(ServerRefused, match=r"Tried to allocate 2.00 GiB'; .*lower --gpu-memory-utilization"):
        scripted.engine().push(model, 5)


def test_an_adapter_for_a_server_without_adapters_is_refused(scripted: Scripted, model: Any) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"rank 4, but .* was started without --enable-lora"):
        scripted.engine().push_adapter(adapted, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 91}, "its vocabulary has 91 tokens, the policy's 92"),
        ({"max_model_len": 32}, "its context holds 32 tokens, but prompt and completion may have 48"),
        ({"sizes": {"architecture": "LlamaForCausalLM"}}, "architecture 'LlamaForCausalLM'"),
        ({"sizes": {"hidden_size": 33}}, r"hidden_size 33 \(the policy has 32\)"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], words: str, scripted: Scripted, model: Any) -> None:
    assert incompatibilities(model, 48, scripted.info) == []
    (problem,) = incompatibilities(model, 48, {**scripted.info, **changes})
    assert re.search(words, problem)


def test_a_policy_in_shards_fits_the_server_that_the_whole_one_fits(
    scripted: Scripted, model: Any, tmp_path: Path
) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        shard(model, FSDPOptions(), torch.device("cpu"))
        assert is_fully_sharded(model) and incompatibilities(model, 48, scripted.info) == []
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"base_url": "http://node-5:8001/"}, "http://node-5:8001"),
        ({"base_url": "https://example.org/serve"}, "https://example.org:443/serve"),
        ({"host": "0.0.0.0", "port": 8123}, "http://127.0.0.1:8123"),
        ({"base_url": "http://a:1", "host": "b", "port": 2}, "http://a:1"),
    ],
)
def test_addresses(arguments: dict[str, Any], text: str) -> None:
    assert str(Address.of(**arguments)) == text


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="vllm_server_base_url is 'node-5:8000', which is no address"):
        Address.of("node-5:8000")


@pytest.mark.parametrize("url", ["http://node-5:eight", "http://node-5:99999"])
def test_an_address_whose_port_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=rf"vllm_server_base_url is '{url}', which is no address"):
        Address.of(url)


@pytest.mark.parametrize(
    ("status", "sent", "waits_s", "error"),
    [
        (503, b"starting", 0.0, ServerUnreachable),
        (503, b"starting", 2.0, ServerTimeout),
        (200, b"", 0.0, ServerUnreachable),
        (200, b'{"a": ', 0.0, ServerUnreachable),
    ],
)
def test_an_answer_that_breaks_off_is_a_server_that_went_away(
    status: int, sent: bytes, waits_s: float, error: type[Exception]
) -> None:
    """It announces more bytes than it sends, and then closes or hangs."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(sent)
            self.wfile.flush()
            time.sleep(waits_s)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with pytest.raises(error):
            call(Address.of(port=server.server_port), "info", timeout_s=0.5)
    finally:
        server.shutdown()
        server.server_close()
