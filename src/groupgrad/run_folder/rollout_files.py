"""Writes the rollouts of each step into a folder of bounded size."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from groupgrad.byte_sizes import bytes_text
from groupgrad.run_folder.rollout_table import to_parquet
from groupgrad.run_folder.run_files import IMAGES, parse_rollout_file, replace_file, rollout_file

logger = logging.getLogger(__name__)

MAX_IMAGE_SIDE = 768
"""Pixels of the longer side of a stored image."""


class RolloutFiles:
    """Files of a rank's rollouts, one a step, whose sizes sum to at most `keep_bytes`.

    Where all rows of the steps to come would not fit, whole groups of each step are left out at random, by the run's
    `seed` and the step, so that the rest of the run gets an even share of the space; one warning says so. Images go to
    `images`, a folder whose files count here only if it is the default.
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
    ):
        self.folder, self._images_folder = folder, folder.parent / IMAGES if images is None else images
        self._counts_images = images is None
        self._world_size = world_size
        self._rank, self._keep_bytes, self._seed = rank, keep_bytes, seed
        self._used: int | None = None
        """Bytes of the rank's files; None before the first write."""
        self._row_bytes: float | None = None
        """Bytes of a row in the last file."""
        self._last_step: int | None = None
        """The last step that has sampled, whether its rows were kept or left out."""
        self._has_thinned = False

    def write(
        self, step: int, tables: Sequence[pa.Table], *, max_steps: int, images: Mapping[str, Any] | None = None
    ) -> None:
        """Writes the file of a step of `max_steps`; `tables` are the generation batches that the step sampled.

        `images` has the images that the tables name. OSError if a file cannot be written.
        """
        if self._used is None:
            self._used = self._bytes_on_disk()
        found = self._fitting(step, tables, max_steps)
        self._last_step = step
        if found is None:
            return
        table, data = found
        path = self.folder / rollout_file(step, self._rank)
        before = path.stat().st_size if path.exists() else 0
        replace_file(path, lambda aside: aside.write_bytes(data))
        self._used += data.size - before
        given = images or {}
        for name in dict.fromkeys(name for names in table["images"].to_pylist() for name in names if name in given):
            self._write_image(name, given[name])

    def _fitting(self, step: int, tables: Sequence[pa.Table], max_steps: int) -> tuple[pa.Table, pa.Buffer] | None:
        """The rows that are kept and the bytes of their file; None if no group fits.

        A file that is too large is made again with at most half of the groups. That happens to the first one, before
        the bytes of a row are known, and to one with longer rows than the last one.
        """
        assert self._used is not None
        whole, groups = pa.concat_tables(tables, promote_options="default"), _groups(tables)
        kept = self._sample(step, groups, max_steps, most=len(groups))
        while kept:
            table = whole if len(kept) == len(groups) else whole.take([row for group in kept for row in group])
            data = to_parquet(table)
            self._row_bytes = data.size / table.num_rows
            if self._used + data.size <= self._keep_bytes:
                return table, data
            self._thin()
            kept = self._sample(step, groups, max_steps, most=len(kept) // 2)
        return None

    def _sample(self, step: int, groups: list[list[int]], max_steps: int, most: int) -> list[list[int]]:
        """The groups that fit into this step's share of the space that is left, at most `most`, in their order."""
        assert self._used is not None
        if self._row_bytes is None:
            return groups
        gap = 1 if self._last_step is None else max(1, step - self._last_step)
        files_left = max(1.0, (max_steps - step + 1) / gap)
        share = max(0, self._keep_bytes - self._used) / files_left
        needed = self._row_bytes * sum(map(len, groups))
        if needed <= share and len(groups) <= most:
            return groups
        self._thin()
        generator = random.Random(f"{self._seed}/{step}/{self._rank}")  # training's random streams stay as they are
        wanted = min(1.0, share / needed) * len(groups)
        count = min(int(wanted) + (generator.random() < wanted % 1), most)
        return [groups[place] for place in sorted(generator.sample(range(len(groups)), count))]

    def _thin(self) -> None:
        if not self._has_thinned:
            self._has_thinned = True
            logger.warning(
                "the rollouts of all steps to come do not fit into rollouts_keep (%s on this rank), so %s gets a "
                "random part of their groups from now on; raise rollouts_keep to keep more; said once",
                bytes_text(self._keep_bytes),
                self.folder,
            )

    def _bytes_on_disk(self) -> int:
        """Bytes of this rank's files, and on the first rank those of images.

        Files of a run that had more ranks are counted by the ranks that there are now.
        """
        if not self.folder.is_dir():
            return 0
        places = ((path, parse_rollout_file(path.name)) for path in self.folder.iterdir())
        of_rank = [path for path, place in places if place is not None and place[1] % self._world_size == self._rank]
        images = self._images_folder.glob("*.jpg") if self._rank == 0 and self._counts_images else ()
        return sum(path.stat().st_size for path in [*of_rank, *images])

    def _write_image(self, name: str, image: Any) -> None:
        """Stores an image once under its name, scaled to at most 768 pixels, while there is space."""
        assert self._used is not None
        path = self._images_folder / f"{name}.jpg"
        if path.exists() or self._used >= self._keep_bytes:
            return
        small = image.convert("RGB")
        small.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
        replace_file(path, lambda aside: small.save(aside, format="JPEG", quality=85))
        self._used += path.stat().st_size


def _groups(tables: Sequence[pa.Table]) -> list[list[int]]:
    """The rows of each group, by their places in all tables; two generation batches may number their groups alike."""
    groups: dict[tuple[int, int], list[int]] = {}
    place = 0
    for number, table in enumerate(tables):
        for group in table["group"].to_pylist():
            groups.setdefault((number, group), []).append(place)
            place += 1
    return list(groups.values())
