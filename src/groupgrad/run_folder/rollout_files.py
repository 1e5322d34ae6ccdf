"""Writes the rollouts of each step into a folder of bounded size."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from groupgrad.byte_sizes import bytes_text
from groupgrad.run_folder.rollout_table import StoredRows, images_of, to_parquet, to_table
from groupgrad.run_folder.run_files import IMAGES, parse_rollout_file, replace_file, rollout_file

logger = logging.getLogger(__name__)

MAX_IMAGE_SIDE = 768
"""Pixels of the longer side of a stored image."""


class RolloutFiles:
    """Files of a rank's rollouts, one a step, whose sizes sum to at most `keep_bytes`.

    Where all rows of the steps to come would not fit, whole groups of each step are left out at random, by the run's
    `seed` and the step, so that the rest of the run gets an even share of the space. `on_thin` is then called once with
    a sentence that says so. Images go to `images`, a folder whose files count here only if it is the default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        keep_bytes: int,
        seed: int,
        world_size: int = 1,
        images: Path | None = None,
        on_thin: Callable[[str], object] = logger.warning,
    ):
        self.folder, self._images_folder = folder, folder.parent / IMAGES if images is None else images
        self._counts_images = images is None
        self._world_size = world_size
        self._rank, self._keep_bytes, self._seed, self._on_thin = rank, keep_bytes, seed, on_thin
        self._used: int | None = None
        """Bytes of the rank's files; None before the first write."""
        self._row_bytes: float | None = None
        """Bytes of a row in the last file."""
        self._last_step: int | None = None
        """The last step that has sampled, whether its rows were kept or left out."""
        self._images: set[str] = set()
        self._has_thinned = False

    def write(self, step: int, parts: Sequence[StoredRows], *, max_steps: int) -> None:
        """Writes the file of a step of `max_steps`; `parts` are the generation batches that the step sampled.

        OSError if it cannot be written.
        """
        if self._used is None:
            self._used = self._bytes_on_disk()
        found = self._fitting(step, parts, max_steps)
        self._last_step = step
        if found is None:
            return
        kept, tables, data = found
        path = self.folder / rollout_file(step, self._rank)
        before = path.stat().st_size if path.exists() else 0
        replace_file(path, lambda aside: aside.write_bytes(data))
        self._used += data.size - before
        for part, table in zip(kept, tables):
            self._write_images(part, table["images"].to_pylist())

    def _fitting(
        self, step: int, parts: Sequence[StoredRows], max_steps: int
    ) -> tuple[list[StoredRows], list[Any], Any] | None:
        """The rows that are kept, their tables and the bytes of the file; None if no group fits.

        A file that is too large is made again with at most half of the groups. That happens to the first one, before
        the bytes of a row are known, and to one with longer rows than the last one.
        """
        import pyarrow as pa

        assert self._used is not None
        most = sys.maxsize
        while kept := self._sample(step, parts, max_steps, most):
            tables = [to_table(step, part) for part in kept]
            data = to_parquet(pa.concat_tables(tables, promote_options="default"))
            self._row_bytes = data.size / sum(len(part.rollouts) for part in kept)
            if self._used + data.size <= self._keep_bytes:
                return kept, tables, data
            self._thin()
            most = sum(len(_groups(part)) for part in kept) // 2
        return None

    def _sample(self, step: int, parts: Sequence[StoredRows], max_steps: int, most: int) -> list[StoredRows]:
        """The rows that fit into this step's share of the space that is left, of at most `most` groups."""
        assert self._used is not None
        groups = [(part, rows) for part in parts for rows in _groups(part)]
        if self._row_bytes is None or not groups:
            return list(parts)
        gap = 1 if self._last_step is None else max(1, step - self._last_step)
        files_left = max(1.0, (max_steps - step + 1) / gap)
        share = max(0, self._keep_bytes - self._used) / files_left
        needed = self._row_bytes * sum(len(rows) for _, rows in groups)
        if needed <= share and len(groups) <= most:
            return list(parts)
        self._thin()
        generator = random.Random(f"{self._seed}/{step}/{self._rank}")  # training's random streams stay as they are
        wanted = min(1.0, share / needed) * len(groups)
        count = min(int(wanted) + (generator.random() < wanted % 1), most)
        chosen = {id(rows): None for _, rows in generator.sample(groups, count)}
        kept = []
        for part in parts:
            rows = [row for owner, group in groups if owner is part and id(group) in chosen for row in group]
            if rows:
                kept.append(part.select(rows))
        return kept

    def _thin(self) -> None:
        if not self._has_thinned:
            self._has_thinned = True
            self._on_thin(
                f"the rollouts of all steps to come do not fit into rollouts_keep ({bytes_text(self._keep_bytes)} on "
                f"this rank), so {self.folder} gets a random part of their groups from now on; raise rollouts_keep to "
                "keep more; said once"
            )

    def _bytes_on_disk(self) -> int:
        """Bytes of this rank's files, and on the first rank those of images.

        Files of a run that had more ranks are counted by the ranks that there are now.
        """
        if not self.folder.is_dir():
            return 0
        places = ((path, parse_rollout_file(path.name)) for path in self.folder.iterdir())
        own = [path for path, place in places if place is not None and place[1] % self._world_size == self._rank]
        images = self._images_folder.glob("*.jpg") if self._rank == 0 and self._counts_images else ()
        return sum(path.stat().st_size for path in [*own, *images])

    def _write_images(self, part: StoredRows, names: Sequence[Sequence[str]]) -> None:
        """Stores each image once under its name, scaled to at most 768 pixels, while there is space."""
        for rollout, names_of_row in zip(part.rollouts, names):
            for name, image in zip(names_of_row, images_of(rollout)):
                if name not in self._images:
                    self._images.add(name)
                    self._write_image(self._images_folder / f"{name}.jpg", image)

    def _write_image(self, path: Path, image: Any) -> None:
        assert self._used is not None
        if path.exists() or self._used >= self._keep_bytes:
            return
        small = image.convert("RGB")
        small.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
        replace_file(path, lambda aside: small.save(aside, format="JPEG", quality=85))
        self._used += path.stat().st_size


def _groups(part: StoredRows) -> list[list[int]]:
    """Places of the rows of each group."""
    groups: dict[int, list[int]] = {}
    for row, rollout in enumerate(part.rollouts):
        groups.setdefault(rollout.index // part.num_generations, []).append(row)
    return list(groups.values())
