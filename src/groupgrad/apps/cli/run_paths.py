"""Finds the runs and the sweeps at the paths that a user names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from groupgrad.apps.sweep.store import FILE as SWEEP_FILE
from groupgrad.run_folder.run_folder import NoRun, RunFolder


class RunPaths:
    """Paths of runs, of sweeps, or of folders of them. Runs that begin later are found when they are looked for again.

    NoRun, which names the path, if a path holds neither a run nor a sweep.
    """

    def __init__(self, paths: Sequence[str]):
        self._paths = [Path(path) for path in paths]
        self._known: dict[Path, RunFolder] = {}
        self.sweeps: list[Path] = []
        """Folders of sweeps, each once."""
        for path in self._paths:
            sweeps = [folder for folder in _with_inner(path) if (folder / SWEEP_FILE).is_file()]
            if not sweeps and not any(_runs_at(path)):
                RunFolder(path)  # which says what is missing
            places = {folder.resolve() for folder in self.sweeps}
            self.sweeps += [folder for folder in sweeps if folder.resolve() not in places]

    def runs(self) -> list[RunFolder]:
        """All runs; runs that are new since the last call come last. Runs with equal names get their paths as names."""
        for run in (run for path in self._paths for run in _runs_at(path)):
            self._known.setdefault(run.path.resolve(), run)
        runs = list(self._known.values())
        names = [path.name for path in self._known]
        for run, name in zip(runs, names):
            run.name = str(run.path) if names.count(name) > 1 else name
        return runs


def _with_inner(path: Path) -> list[Path]:
    """A folder and the folders in it, by name."""
    inner = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    return [path, *inner]


def _runs_at(path: Path) -> Iterator[RunFolder]:
    """The run at a path, or else the runs in that folder and the arms of the sweeps there."""
    with suppress(NoRun):
        yield RunFolder(path)
        return
    for folder in _with_inner(path):
        is_sweep = (folder / SWEEP_FILE).is_file()
        for place in _with_inner(folder / "arms")[1:] if is_sweep else [folder]:
            with suppress(NoRun):
                yield RunFolder(place)
