"""`read_runs`: the runs below a directory, with all data of their loggers and checkpoints.

A run may have been logged by several loggers into several folders. Folders are taken for one run if they hold files of
different kinds that agree wherever both have a value.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, DataError
from ..protocols import Tree
from ..remote import is_url
from ..yaml_file import parse
from .checkpoints import CheckpointFile, CheckpointReader
from .environment import ENVIRONMENT_FILE
from .evaluations import EVALUATION_FILE, join_evaluations
from .media import Media
from .names import natural
from .sources import CSV_FILE, EVENT_FILES, JSON_LINES_FILE, NumberSource, find_sources

if TYPE_CHECKING:
    from ..remote.reader import RemoteReader

__all__ = ["CheckpointFile", "LoggedRun", "RunReader", "Series", "read_runs"]

# Names of progress counters: they are axes, not curves.
AXES = ("epoch", "samples", "tokens")
_NOT_CURVES = ("wall_s", *AXES)
_TIMELINE_FILE = "timeline.json"
_TIMELINE_FACTS = {"optimizer steps": "num_steps", "bottleneck": "bottleneck", "bound by": "bound"}
_CONFIG_FILES = ("hparams.yaml", "config.yaml")
_READ_FILES = (
    CSV_FILE,
    JSON_LINES_FILE,
    EVENT_FILES,
    *_CONFIG_FILES,
    ENVIRONMENT_FILE,
    EVALUATION_FILE,
    _TIMELINE_FILE,
    "media",
)
_NO_METRIC = ("hp_metric", -1.0)  # what TensorBoardLogger writes so that its HPARAMS page has a metric
_VERSION = re.compile(r"version_\d+")
_SAME = 1e-5  # relative: TensorBoard keeps 24 bits of a number


@dataclass
class Series:
    """One metric of one run.

    Attributes:
        name: As it was logged.
        steps: Ascending.
        values: One per step; may be NaN or infinite.
    """

    name: str
    steps: list[int]
    values: list[float]


@dataclass
class LoggedRun:
    """The data of one run.

    Attributes:
        name: What it is called in pictures.
        folders: Where its loggers wrote; of a run at a URL, where the copies are that were read.
        kinds: The formats that were read.
        series: Its metrics by name, in their natural order.
        axes: "time" (seconds), "epoch", "samples", "tokens": the steps and the counts at these steps, both ascending.
        config: Hyperparameters, nested names joined by "/".
        environment: What it ran on and with; only what was recorded.
        checkpoints: Those on disk, by step.
        timeline: Phase to the seconds it took in the whole fit; empty if `trainer.timeline` was not saved.
        timeline_notes: What limits the speed of a step, and what to do about it.
        media: Logged images, texts and histograms that are in event files; those in folders are read for the page.
        problems: What could not be read.
        places: The URLs of `folders`; empty for runs on this machine.
        evaluated: The checkpoints that a run has evaluated which has not trained; relative to its folder, or URLs.
    """

    name: str
    folders: list[Path] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    series: dict[str, Series] = field(default_factory=dict)
    axes: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    checkpoints: list[CheckpointFile] = field(default_factory=list)
    timeline: dict[str, float] = field(default_factory=dict)
    timeline_notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    evaluated: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step that any metric has; -1 before the first."""
        return max((series.steps[-1] for series in self.series.values()), default=-1)

    @property
    def seconds(self) -> float | None:
        """How long the run has taken, without the time between its sessions; None if its loggers did not say."""
        return self.axes["time"][1][-1] if "time" in self.axes else None


def read_runs(directories: Iterable[str | os.PathLike[str]], *, checkpoints: bool = True) -> list[LoggedRun]:
    """Return the runs that are found at and below directories.

    Args:
        directories: Each is a run's directory or URL, or one that holds several. "NAME=DIRECTORY" names its run.
        checkpoints: Whether to look for checkpoints, and into them.

    Raises:
        ConfigError: A directory does not exist.
        DataError: Nothing was logged in one of them.
    """
    reader = RunReader(directories, checkpoints=checkpoints)
    runs = reader.read()
    empty = reader.empty_directories()
    if empty:
        raise DataError(
            f"No logged metrics were found in {', '.join(empty)}: no metrics.csv, metrics.jsonl or TensorBoard file.",
            fix="pass the directory that a logger wrote to (trainer.log_dir), or log with CSVLogger, "
            "TensorBoardLogger or JSONLinesLogger.",
        )
    return runs


class RunReader:
    """Reads directories again and again, and each time only what is new in them.

    Args:
        directories: As for `read_runs`.
        checkpoints: Whether to look for checkpoints, and into them.

    Raises:
        ConfigError: A directory does not exist.
    """

    def __init__(self, directories: Iterable[str | os.PathLike[str]], *, checkpoints: bool = True) -> None:
        self._remote: dict[Path, RemoteReader] = {}
        self._roots: list[tuple[str, Path]] = []
        missing = []
        for directory in directories:
            name, place = _named(directory)
            if isinstance(place, Path):
                root, is_there = place, place.is_dir()
            else:
                reader = _open_remote(place)
                root, is_there = reader.folder, reader.exists()
                self._remote[root] = reader
            self._roots.append((name, root))
            if not is_there:
                missing.append(str(place))
        if missing or not self._roots:
            raise ConfigError(
                f"No such directory: {', '.join(missing)}" if missing else "No directory was given.",
                fix="pass the directory of a run, such as trainer.log_dir.",
            )
        self._checkpoints = CheckpointReader(self._is_closed) if checkpoints else None
        self._sources: dict[tuple[Path, type], NumberSource] = {}

    def empty_directories(self) -> list[str]:
        """Return the directories in which the last `read` found nothing."""
        empty = [root for _, root in self._roots if not any(_is_below(key[0], root) for key in self._sources)]
        return [self._remote[root].url if root in self._remote else str(root) for root in empty]

    def read(self) -> list[LoggedRun]:
        """Return the runs as they are now; a directory that holds nothing yet gives none."""
        runs: list[LoggedRun] = []
        seen: set[Path] = set()
        for name, root in self._roots:
            remote = self._remote.get(root)
            if remote is not None:
                remote.refresh()
            folders = [folder for folder in _folders(root) if folder.resolve() not in seen]
            seen.update(folder.resolve() for folder in folders)
            groups = self._groups(folders)
            found = [_merge(group) for group in groups]
            for run in found:
                run.name = name if len(found) == 1 and name else _label(run, root, name, is_alone=len(found) == 1)
                _read_beside(run, root, is_alone=len(found) == 1)
                if not name:  # what was named is to be seen under its name
                    _read_evaluated(run)
                if remote is not None:
                    run.places = [remote.shown(str(folder)) for folder in run.folders]
                    run.problems = [remote.shown(problem) for problem in run.problems]
            found = join_evaluations(found, root)
            if self._checkpoints is not None:
                self._checkpoints.assign(root, found)
            runs += found
        runs = join_evaluations(runs)
        _make_names_differ(runs)
        return runs

    def _is_closed(self, path: Path) -> bool:
        return any(remote.is_placeholder(path) for remote in self._remote.values())

    def _groups(self, folders: list[Path]) -> list[list[NumberSource]]:
        groups: list[list[NumberSource]] = []
        for folder in folders:
            here: list[NumberSource] = []
            for source in find_sources(folder):
                known = self._sources.setdefault((folder, type(source)), source)
                known.refresh()
                here.append(known)
            same = next((group for group in groups if here and _is_same_run(group, here)), None)
            if same is not None:
                same += here
            elif here:
                groups.append(here)
        return groups


def _named(directory: str | os.PathLike[str]) -> tuple[str, Path | str]:
    """Return the name that was given to a directory, "" without one, and its path or URL."""
    text = os.fspath(directory)
    name, equals, path = text.partition("=")
    if not (equals and path and "/" not in name and not Path(text).exists()):
        name, path = "", text
    return name, path if is_url(path) else Path(path).expanduser()


def _open_remote(url: str) -> RemoteReader:
    from ..remote.reader import RemoteReader  # not imported where all runs are on this machine

    return RemoteReader(url, _READ_FILES, large=("*.ckpt",))


def _folders(root: Path) -> list[Path]:
    """Return the directory and those below it, without hidden ones; files in them may change while this looks."""
    found = []
    for folder, below, _ in os.walk(root):
        below[:] = sorted((name for name in below if not name.startswith(".")), key=natural)
        found.append(Path(folder))
    return found


def _is_below(folder: Path, root: Path) -> bool:
    return folder == root or root in folder.parents


def _is_same_run(one: Sequence[NumberSource], other: Sequence[NumberSource]) -> bool:
    """Whether two folders belong to one run: no kind of file is in both, and values agree wherever both have one."""
    if {source.kind for source in one} & {source.kind for source in other}:
        return False
    has_common = False
    for a in one:
        for b in other:
            for name in a.points.keys() & b.points.keys():
                if name in _NOT_CURVES or name.startswith("lr"):
                    continue  # other runs may have the same values
                mine, its = a.points[name], b.points[name]
                common = mine.keys() & its.keys()
                if not all(_is_close(mine[step], its[step]) for step in common):
                    return False
                has_common = has_common or bool(common)
    # Before both have written a common step, the name of the folder must do.
    return has_common or one[0].folder.name == other[0].folder.name


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SAME, abs_tol=1e-37) or (math.isnan(a) and math.isnan(b))


def _merge(sources: Sequence[NumberSource]) -> LoggedRun:
    points: dict[str, dict[int, float]] = {}
    clock: dict[int, float] = {}
    by_precision = sorted(sources, key=lambda source: source.precision)
    for source in by_precision:
        clock.update(source.clock)
        for name, by_step in source.points.items():
            points.setdefault(name, {}).update(by_step)
    run = LoggedRun(name="")
    run.folders = list(dict.fromkeys(source.folder for source in sources))
    run.kinds = [source.kind for source in reversed(by_precision)]
    run.problems = [problem for source in sources for problem in source.problems]
    run.media = [item for source in sources for item in source.media]
    for name in sorted(points, key=natural):
        steps = sorted(points[name])
        values = [points[name][step] for step in steps]
        if name == _NO_METRIC[0] and set(values) == {_NO_METRIC[1]}:
            continue
        if name not in _NOT_CURVES:
            run.series[name] = Series(name, steps, values)
        elif name in AXES:
            _add_axis(run, name, dict(zip(steps, values, strict=True)))
    _add_axis(run, "time", clock)
    return run


def _add_axis(run: LoggedRun, name: str, positions: Mapping[int, float]) -> None:
    steps: list[int] = []
    values: list[float] = []
    for step in sorted(positions):
        # Values of one step come at slightly different times, also in the order of two loggers.
        if math.isfinite(positions[step]) and (not values or positions[step] >= values[-1]):
            steps.append(step)
            values.append(positions[step])
    if steps:
        run.axes[name] = (steps, values)


def _label(run: LoggedRun, root: Path, name: str, *, is_alone: bool) -> str:
    if is_alone:
        whole = root.resolve()
        # "version_0" alone says nothing.
        return f"{whole.parent.name}/{whole.name}" if _VERSION.fullmatch(whole.name) else whole.name
    parts = run.folders[0].relative_to(root).parts
    return "/".join((name or root.resolve().name, *parts))


def _make_names_differ(runs: list[LoggedRun]) -> None:
    """Extend equal names of runs by the parts in which their paths differ."""
    for name in {run.name for run in runs}:
        same = [run for run in runs if run.name == name]
        if len(same) < 2:
            continue
        paths = [run.folders[0].resolve() for run in same]
        shared = os.path.commonpath(paths)
        for run, path in zip(same, paths, strict=True):
            run.name = f"{name} ({path.relative_to(shared).as_posix()})"


def _read_beside(run: LoggedRun, root: Path, *, is_alone: bool) -> None:
    """Read what stands beside the logs: configuration, environment, timeline; the nearest file has priority."""
    folders: list[Path] = []
    for folder in run.folders:
        for place in (folder, *folder.parents):
            if not _is_below(place, root) or (place == root and not is_alone and place not in run.folders):
                break
            folders.append(place)
    for folder in sorted(set(folders), key=lambda place: len(place.parts)):
        for name in _CONFIG_FILES:
            run.config.update(_flat(_load(folder / name, run.problems)))
        run.environment.update(_flat(_load(folder / ENVIRONMENT_FILE, run.problems)))
        _read_timeline(run, _load(folder / _TIMELINE_FILE, run.problems))


def _read_evaluated(run: LoggedRun) -> None:
    if any((folder / ENVIRONMENT_FILE).is_file() for folder in run.folders):
        return  # it has trained
    for folder in run.folders:
        names = _load(folder / EVALUATION_FILE, run.problems).get("checkpoints")
        run.evaluated += [str(name) for name in names] if isinstance(names, list) else []


def _load(path: Path, problems: list[str]) -> Mapping[Hashable, Tree]:
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else parse(text, path.name)
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {str(error).splitlines()[0]}")
        return {}
    return content if isinstance(content, dict) else {}


def _flat(content: Mapping[Hashable, Tree], before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            found.update(_flat(value, f"{before}{key}/"))
        else:
            found[f"{before}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def _read_timeline(run: LoggedRun, content: Mapping[Hashable, Tree]) -> None:
    """Take what `trainer.timeline.save()` wrote: seconds of each phase, what limits the speed of a step, advice."""
    phases = content.get("seconds")
    if not isinstance(phases, dict):
        return
    numbers = {str(name): seconds for name, seconds in phases.items() if isinstance(seconds, int | float)}
    run.timeline = {name: float(seconds) for name, seconds in numbers.items() if math.isfinite(seconds) and seconds > 0}
    run.timeline_notes = [f"{name}: {content[key]}" for name, key in _TIMELINE_FACTS.items() if content.get(key)]
    for texts in (content.get("waited_for"), content.get("advice")):
        run.timeline_notes += [str(text) for text in texts] if isinstance(texts, list) else []
