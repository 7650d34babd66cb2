"""A run that is resumed equals one that was never stopped, bit for bit: at every place where a checkpoint is taken.

The reference run is photographed (its whole folder is copied) at each such place; then everything is built anew, the
folder is put back as it was, and training goes on from there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import keep
from resume_program import SCENARIOS, Saver, make, points, report

# Resumes per scenario; the places are spread over the run.
RESUMES = 6


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Worker processes are forked: torch must not have threads then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Photographer:
    """Saves a checkpoint at each safe place and copies the run's folder as it is then."""

    def __init__(self, root: Path, photos: Path) -> None:
        self.root, self.photos = root, photos
        self.taken: list[Path] = []

    def __call__(self, trainer: Any) -> None:
        photo = self.photos / f"{len(self.taken):03}-step{trainer.global_step}"
        trainer.save_checkpoint(photo.with_suffix(".ckpt"))
        shutil.copytree(self.root, photo, symlinks=True)
        self.taken.append(photo)

    def restore(self, photo: Path) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(photo, self.root, symlinks=True)


def assert_equal_reports(resumed: dict[str, Any], reference: dict[str, Any]) -> None:
    assert list(resumed) == list(reference)
    assert {name for name in reference if resumed[name] != reference[name]} == set(), {
        name: (resumed[name], reference[name]) for name in reference if resumed[name] != reference[name]
    }


def assert_well_ordered(points_by_tag: dict[str, list[tuple[int, float]]], *, has_skipped_steps: bool = False) -> None:
    for tag, tag_points in points_by_tag.items():
        steps = [step for step, _ in tag_points]
        # Several rows of one step (of the step, of a validation) carry the epoch; so does all between skipped steps.
        may_repeat = has_skipped_steps or tag in ("epoch", "skipped_steps")
        assert steps == sorted(steps if may_repeat else set(steps)), (tag, steps)


@pytest.mark.filterwarnings("ignore:trainer.fit has nothing to do")
@pytest.mark.parametrize("name", keep(SCENARIOS, *(SCENARIOS.keys() - {"workers", "iterable_workers"})))
def test_resume_at_any_place_equals_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    photographer = Photographer(root, tmp_path / "photos")
    reference = make(name, root, [Saver(photographer)])
    reference.fit(None)
    expected, expected_points = report(reference, root), points(root)
    assert_well_ordered(expected_points, has_skipped_steps=name == "skipping")

    taken = photographer.taken
    places = sorted({round(i * (len(taken) - 1) / (RESUMES - 1)) for i in range(RESUMES)})
    for photo in [taken[place] for place in places]:
        photographer.restore(photo)
        resumed = make(name, root, [Saver(lambda trainer: None)])
        resumed.fit(photo.with_suffix(".ckpt"))
        assert_equal_reports({"at": photo.name, **report(resumed, root)}, {"at": photo.name, **expected})
        assert points(root) == expected_points, photo.name
