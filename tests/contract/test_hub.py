"""Pushing to the hub, against a server on this machine that speaks the hub's HTTP interface."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load as load_tensors

from groupgrad.run_folder.run_card import last_metrics

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("hub_script.py")


@dataclass(slots=True)
class Commit:
    """One commit that the server received."""

    repo: str
    revision: str
    token: str | None
    summary: str
    files: dict[str, bytes]

    @property
    def card(self) -> dict[str, Any]:
        """The metadata of the model card."""
        return yaml.safe_load(self.files["README.md"].decode().split("---\n")[1])


@dataclass(slots=True)
class Hub:
    """Repositories and files that the server holds."""

    url: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def of(self, repo: str) -> list[Commit]:
        return [commit for commit in self.commits if commit.repo == repo]


def make_handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, data: Any, status: int = 200) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        @property
        def token(self) -> str | None:
            return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

        def do_GET(self) -> None:
            if self.path == "/api/whoami-v2":
                return self.answer({"name": "ada", "type": "user", "orgs": []})
            if not self.path.endswith("/forbidden"):
                hub.unknown.append(f"GET {self.path}")
            return self.answer({"error": "not found"}, 404)

        def do_PUT(self) -> None:
            content = self.body()
            hub.objects[hashlib.sha256(content).hexdigest()] = content
            self.answer({})

        def do_POST(self) -> None:
            raw = self.body()
            if self.path == "/api/repos/create":
                asked = json.loads(raw)
                if asked["name"] == "forbidden":
                    return self.answer({"error": "not yours"}, 403)
                hub.created.append({**asked, "token": self.token})
                name = f"{asked['organization'] or 'ada'}/{asked['name']}"
                return self.answer({"url": f"{hub.url}/{name}", "name": name})
            if self.path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if "/preupload/" in self.path:
                files = [
                    {
                        "path": f["path"],
                        "uploadMode": "lfs" if f["path"].endswith((".safetensors", ".bin", ".pt")) else "regular",
                    }
                    for f in json.loads(raw)["files"]
                ]
                return self.answer({"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]})
            if self.path.endswith("/info/lfs/objects/batch"):
                asked = json.loads(raw)["objects"]
                put = {"upload": {"href": f"{hub.url}/upload", "header": {}}}
                return self.answer({"transfer": "basic", "objects": [{**item, "actions": put} for item in asked]})
            if "/commit/" in self.path:
                return self.commit(raw)
            hub.unknown.append(f"POST {self.path}")
            return self.answer({"error": "not found"}, 404)

        def commit(self, raw: bytes) -> None:
            where, revision = self.path.removeprefix("/api/").removeprefix("models/").split("/commit/")
            lines = [json.loads(line) for line in raw.splitlines()]
            files: dict[str, bytes] = {}
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
            hub.commits.append(Commit(where, revision, self.token, lines[0]["value"]["summary"], files))
            oid = f"{len(hub.commits):040x}"
            self.answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{where}/commit/{oid}"})

    return Handler


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory, make_model: Any, make_tokenizer: Any) -> Iterator[tuple[Hub, Any]]:
    """The server after the script ran, and what the script's calls returned."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    folder = tmp_path_factory.mktemp("hub")
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, str(SCRIPT), str(folder / "model"), str(folder)]
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    results = next(line for line in ended.stdout.splitlines() if line.startswith("RESULTS "))
    yield hub, json.loads(results.removeprefix("RESULTS "))
    server.shutdown()
    server.server_close()


def test_what_a_push_holds(pushed: tuple[Hub, Any]) -> None:
    hub, results = pushed
    commit = hub.of("ada/tiny-grpo")[0]
    assert {"model.safetensors", "config.json", "generation_config.json"} <= commit.files.keys()
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"} <= commit.files.keys()
    assert load_tensors(commit.files["model.safetensors"])["lm_head.weight"].shape == (92, 32)
    assert json.loads(commit.files["config.json"])["architectures"] == ["Qwen3ForCausalLM"]
    assert (commit.summary, commit.revision, commit.token) == ("Trained on sums", "main", "hf_by_hand")
    assert results["by_hand"]["url"] == f"{hub.url}/ada/tiny-grpo/commit/{hub.commits.index(commit) + 1:040x}"
    assert hub.unknown == []


def test_the_repository_is_created_as_asked(pushed: tuple[Hub, Any]) -> None:
    hub, _ = pushed
    first = next(asked for asked in hub.created if asked.get("type") != "dataset")
    assert (first["organization"], first["name"], first["token"]) == ("ada", "tiny-grpo", "hf_by_hand")
    assert first["visibility"] == "private"


def test_the_card(pushed: tuple[Hub, Any]) -> None:
    hub, _ = pushed
    commit = hub.of("ada/tiny-grpo")[0]
    card = commit.card
    assert card["base_model"] == "Qwen/Qwen2-0.5B-Instruct"
    assert card["datasets"] == ["openai/gsm8k"]
    assert card["tags"] == ["generated_from_trainer", "groupgrad", "grpo", "sums"]
    assert (card["license"], card["library_name"], card["model_name"]) == ("mit", "transformers", "tiny-grpo")
    assert card["pipeline_tag"] == "text-generation"
    text = commit.files["README.md"].decode()
    assert "# tiny-grpo\n" in text
    assert "model='ada/tiny-grpo'" in text
    assert "| `num_generations` | 2 |" in text
    assert "| rewards/checksum/mean |" in text


def test_a_push_in_the_background(pushed: tuple[Hub, Any]) -> None:
    hub, results = pushed
    assert results["by_hand"]["is_future"] is True
    commit = hub.of("ada/tiny-grpo")[1]
    assert results["by_hand"]["later"] == f"{hub.url}/ada/tiny-grpo/commit/{hub.commits.index(commit) + 1:040x}"
    assert (commit.summary, commit.revision) == ("End of training", "drafts")
    assert commit.card["model_name"] == "Tiny"
    assert "model='ada/tiny-grpo'" in commit.files["README.md"].decode()


def test_pushes_while_training(pushed: tuple[Hub, Any]) -> None:
    hub, results = pushed
    commits = hub.of("ada/steady")
    summaries = sorted(commit.summary for commit in commits)
    steps = [f"Training in progress, step {step}" for step in (1, 2)]
    assert summaries == sorted(["Model save", *steps, *(f"{step}, checkpoint" for step in steps)])
    assert {commit.token for commit in commits} == {"hf_in_config"}
    by_summary = {commit.summary: commit for commit in commits}
    assert {"model.safetensors", "README.md", "tokenizer.json"} <= by_summary[steps[0]].files.keys()
    assert by_summary[steps[0]].card["base_model"] == "Qwen/Qwen2-0.5B-Instruct"
    resumable = {
        "last-checkpoint/model.safetensors",
        "last-checkpoint/optimizer.pt",
        "last-checkpoint/trainer_state.json",
    }
    assert resumable <= by_summary[f"{steps[1]}, checkpoint"].files.keys()
    assert any("groupgrad_state" in name for name in by_summary[f"{steps[1]}, checkpoint"].files)
    # A push reads the folder in the background, so that only the last one is known to hold the last step's weights.
    saved = load_tensors(by_summary["Model save"].files["model.safetensors"])["lm_head.weight"]
    resumed = load_tensors(by_summary[f"{steps[1]}, checkpoint"].files["last-checkpoint/model.safetensors"])
    assert (saved == resumed["lm_head.weight"]).all()
    assert results["while_training"]["names"] == ["ada/steady", "ada/at-end"]


def test_one_push_at_the_end(pushed: tuple[Hub, Any]) -> None:
    """The push holds the adapter alone."""
    hub, _ = pushed
    (commit,) = hub.of("ada/at-end")
    assert commit.summary == "End of training"
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= commit.files.keys()
    assert "model.safetensors" not in commit.files
    assert json.loads(commit.files["adapter_config.json"])["base_model_name_or_path"] == "Qwen/Qwen2-0.5B-Instruct"
    card = commit.card
    assert (card["library_name"], card["base_model"]) == ("peft", "Qwen/Qwen2-0.5B-Instruct")
    assert "lora" in card["tags"]


def test_completions_are_uploaded(pushed: tuple[Hub, Any]) -> None:
    hub, results = pushed
    (created,) = [asked for asked in hub.created if asked.get("type") == "dataset"]
    assert (created["organization"], created["name"], created["token"]) == ("ada", "answers", "hf_in_config")
    assert created["visibility"] == "private"
    files = {name: content for commit in hub.of("datasets/ada/answers") for name, content in commit.files.items()}
    assert sorted(files) == ["completions_00001.parquet", "completions_00002.parquet"]
    tables = [pq.read_table(io.BytesIO(content)) for _, content in sorted(files.items())]
    assert [set(table["step"].to_pylist()) for table in tables] == [{0}, {1}]
    assert [table.num_rows for table in tables] == [4, 4]
    error = results["refused"]["error"]
    assert error.startswith("log_completions_hub_repo='ada/forbidden' cannot be written to: HfHubHTTPError: ")
    assert error.endswith("set hub_token, or leave log_completions_hub_repo unset")


def test_no_token_is_uploaded(pushed: tuple[Hub, Any]) -> None:
    hub, _ = pushed
    for commit in hub.commits:
        for name, content in commit.files.items():
            assert b"hf_in_config" not in content, (commit.summary, name)


def test_a_card_without_a_hub(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.train()
    trainer.create_model_card("Sums", "openai/gsm8k", ["sums"], finetuned_from="Qwen/Qwen3-0.6B", language="en")
    text = (tmp_path / "run" / "README.md").read_text()
    card = yaml.safe_load(text.split("---\n")[1])
    assert (card["model_name"], card["datasets"], card["base_model"]) == ("Sums", ["openai/gsm8k"], "Qwen/Qwen3-0.6B")
    assert card["language"] == "en"
    assert card["tags"][-1] == "sums"
    trainer.create_model_card(dataset_tags="a/b", tasks="text2text-generation")
    card = yaml.safe_load((tmp_path / "run" / "README.md").read_text().split("---\n")[1])
    assert (card["model_name"], card["datasets"], card["pipeline_tag"]) == ("run", ["a/b"], "text2text-generation")


def test_a_card_whose_fields_are_one_dict(make_trainer: Any, tmp_path: Path) -> None:
    """Scripts pass `{"tags": [...]}` as the first argument."""
    make_trainer().create_model_card({"tags": ["rl", "tutorial"], "dataset_name": "a/b"})
    card = yaml.safe_load((tmp_path / "run" / "README.md").read_text().split("---\n")[1])
    assert (card["model_name"], card["datasets"], card["tags"][-2:]) == ("run", ["a/b"], ["rl", "tutorial"])


def test_last_metrics() -> None:
    history = [
        {"loss": 2.0, "reward": 0.25, "step_time": 9.0, "step": 1},
        {"loss": 1.0, "reward": 0.5, "rewards/f/mean": 0.5, "frac_reward_zero_std": 0.0, "step": 2},
        {"eval_reward": 0.75, "eval_runtime": 3.0, "eval_completions/mean_length": 4.0, "step": 2},
    ]
    assert last_metrics(history) == {
        "loss": 1.0,
        "reward": 0.5,
        "rewards/f/mean": 0.5,
        "frac_reward_zero_std": 0.0,
        "eval_reward": 0.75,
        "eval_completions/mean_length": 4.0,
    }
