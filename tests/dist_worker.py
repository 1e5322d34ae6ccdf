"""One rank of two: calls every collective and writes what it got as JSON. Arguments: rank, folder."""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path
from typing import Any

import torch

from groupgrad import dist


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    at_exit = [atexit._ncallbacks()]  # pyright: ignore[reportAttributeAccessIssue]
    dist.all_sum([0.0])
    at_exit.append(atexit._ncallbacks())  # pyright: ignore[reportAttributeAccessIssue]
    rows = torch.arange(6.0).view(3, 2) if rank == 0 else torch.tensor([[10.0, 11.0]])
    rows.requires_grad_(True)
    gathered = dist.all_gather_rows(rows * 2)
    found: dict[str, Any] = {
        "where": [dist.is_active(), dist.world_size(), dist.rank(), dist.is_main()],
        "objects": dist.all_gather_objects({"rank": rank}),
        "rows": gathered.tolist(),
        "rows_gradient": gathered.requires_grad,
        "no_rows": dist.all_gather_rows(torch.zeros(0, dtype=torch.int64) if rank else torch.tensor([7])).tolist(),
        "half": str(dist.all_gather_rows(torch.ones(1, dtype=torch.bfloat16)).dtype),
        "sums": dist.all_sum([1.0 + rank, 0.1, 2.0**53]),
        "failure": failure(ValueError("bad reward") if rank == 1 else None),
        "both": failure(KeyError(f"rank {rank}")),
        "no_failure": failure(None),
        "still_in_step": dist.all_sum([1.0]),
    }
    at_exit.append(atexit._ncallbacks())  # pyright: ignore[reportAttributeAccessIssue]
    found["at_exit"] = [count - at_exit[0] for count in at_exit]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def failure(error: BaseException | None) -> list[str] | None:
    try:
        dist.raise_together(error)
    except Exception as caught:
        return [type(caught).__name__, str(caught)]
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
