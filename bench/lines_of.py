"""Counts the lines of the vLLM engine by part, at several commits: `python bench/lines_of.py COMMIT [COMMIT ...]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "src/groupgrad/engines/vllm"
PARTS = {
    "weight transfer": "transfer_engine transfer_plugin weight_group weight_receiver weight_sender weight_transport "
    "wire worker",
    "server: routes, rows, start": "row_stream serve_arguments server server_launch",
    "server: keys, bounds of requests": "api_keys server_requests",
    "trainer's side of servers, and pools of them": "client http server_pool server_rows server_session",
    "colocate, memory, tensor parallelism": "colocate colocate_start memory_check tensor_parallel",
    "adapters and images": "lora media",
    "options, log-probs, the trainer's engine": "__init__ vllm_engine vllm_params vllm_policy",
}
"""Modules of each part, with those of earlier commits."""


def part_of(module: str) -> str:
    """The part that has this module. KeyError for an unknown one."""
    return {name: part for part, names in PARTS.items() for name in names.split()}[module]


def lines_at(commit: str) -> dict[str, int]:
    """Lines of each part at a commit, comments and blank lines included."""
    counts = dict.fromkeys(PARTS, 0)
    for path in _git("ls-tree", "-r", "--name-only", commit, FOLDER).split():
        if path.endswith(".py"):
            counts[part_of(Path(path).stem)] += _git("show", f"{commit}:{path}").count("\n")
    return counts


def table(columns: dict[str, dict[str, int]]) -> str:
    """A Markdown table with a column for each commit."""
    rows = [["lines of", *columns], ["---", *["---:"] * len(columns)]]
    rows += [[part, *(f"{counts[part]:,}" for counts in columns.values())] for part in PARTS]
    rows.append(["all", *(f"{sum(counts.values()):,}" for counts in columns.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    print(table({commit: lines_at(commit) for commit in sys.argv[1:]}))
