"""The SLURM script of docs/vllm.md for five nodes, run with stand-ins for the commands of a cluster."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from groupgrad.apps.cli.main import main
from groupgrad.apps.cli.plan import parser
from groupgrad.integrations.vllm.serve_command import vllm_arguments

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Several nodes\n")[2].partition("\n## ")[0]

STANDS_IN = {
    "openssl": "printf '%064d' 7",
    "scontrol": "printf 'node-%s\\n' 1 2 3 4 5",
    # Each node of the list runs the rest, as SLURM's task with its number.
    "srun": """
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) list=${1#*=} ;; esac
    shift
done
IFS=, read -ra nodes <<< "$list"
for number in "${!nodes[@]}"; do
    NODE=${nodes[number]} SLURM_PROCID=$number "$@"
done
""",
    "groupgrad": 'echo "$NODE: groupgrad $* (key of ${#VLLM_API_KEY})" >> "$COMMANDS"',
    "accelerate": 'echo "$NODE: accelerate $* (key of ${#VLLM_API_KEY})" >> "$COMMANDS"',
}
(PLAN_COMMAND,) = re.findall(r"^groupgrad plan (.*)$", SECTION.replace("\\\n", ""), re.MULTILINE)
PLAN = re.findall(r"^(?:GiB on a device|full, zero3) .*$", SECTION, re.MULTILINE)
"""The lines of `groupgrad plan` that the page shows; the slow test compares them with what it prints."""
SERVING_GIB = re.findall(r"each serving GPU holds ([\d.]+) GiB of weights", SECTION)
QWEN_72B = {
    "model_type": "qwen2",
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, list[str]]:
    """The words of each node's command; the script's file system is the repository's."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", SECTION, re.DOTALL)
    log = tmp_path / "commands"
    for name, body in STANDS_IN.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COMMANDS": str(log), "SLURM_JOB_NODELIST": "node-[1-5]"}
    subprocess.run(["bash", "-c", script], check=True, cwd=ROOT, env=environment, timeout=60)
    deadline = time.monotonic() + 10.0
    while len(lines := log.read_text().splitlines()) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)  # the serving node runs beside the script
    print("\n".join(lines))
    print("each GPU of node-1 to node-4:", *PLAN[:2], sep="\n")
    print("each GPU of node-5:", *SERVING_GIB, "GiB of weights")
    return {node: words.split() for node, _, words in (line.partition(": ") for line in sorted(lines))}


def test_each_node_has_its_command(commands: dict[str, list[str]]) -> None:
    assert list(commands) == [f"node-{number}" for number in range(1, 6)]
    keys = {" ".join(words[-3:]) for words in commands.values()}
    assert keys == {"(key of 64)"}, "all nodes have the key"
    name, command, *arguments = commands["node-5"][:-3]
    assert (name, command) == ("groupgrad", "vllm-serve")
    served = vllm_arguments(arguments)
    assert served[served.index("--tensor-parallel-size") + 1] == "8" and "0.0.0.0" in served
    for number in range(4):
        name, command, *arguments = commands[f"node-{number + 1}"][:-3]
        assert (name, command) == ("accelerate", "launch")
        options: Any = launch_command_parser().parse_args(arguments)
        assert (options.num_machines, options.num_processes, options.machine_rank) == (4, 32, number)
        assert (options.main_process_ip, options.main_process_port) == ("node-1", 29500)
        assert options.deepspeed_multinode_launcher == "standard" and (ROOT / options.config_file).is_file()
        assert options.training_script == "train.py"
        assert options.training_script_args == ["--server", "node-5", "--model", "Qwen/Qwen2.5-72B"]


def test_the_plan_and_the_server_hold_what_the_script_trains(commands: dict[str, list[str]]) -> None:
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", SECTION, re.DOTALL)
    (config,) = [
        node
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "GRPOConfig"
    ]
    set_to = {word.arg: ast.unparse(word.value) for word in config.keywords}
    options, _ = parser().parse_known_args(PLAN_COMMAND.split())
    assert set_to["max_completion_length"] == "4096" == str(options.max_completion_length)
    assert set_to["per_device_train_batch_size"] == str(options.per_device_train_batch_size)
    assert set_to["gradient_checkpointing"] == "True"
    assert (
        PLAN[1].endswith(f"{options.per_device_train_batch_size} (asked for) with checkpointing")
        and options.devices == 32
    )
    served = vllm_arguments(commands["node-5"][2:-3])
    assert options.prompt + options.max_completion_length <= int(served[served.index("--max-model-len") + 1])


@pytest.mark.slow
def test_the_plan_of_the_nodes_is_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B))
    assert main(["plan", *PLAN_COMMAND.replace("Qwen/Qwen2.5-72B", str(tmp_path)).split()]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = [line for line in printed if line.startswith(("GiB on a device", "full, zero3"))]
    assert [line.rstrip() for line in shown] == PLAN and len(shown) == 2
    (parameters,) = re.findall(r": ([\d,]+) parameters in", printed[0])
    assert [f"{2 * int(parameters.replace(',', '')) / 8 / 2**30:.2f}"] == SERVING_GIB
