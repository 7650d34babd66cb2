"""Names of packages that are imported on first use, and what is said of a name that there is not."""

from __future__ import annotations

import traceback

import pytest

import loopwright as lw
from loopwright.lazy import is_core, origin, restore_paths, show_path


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ModelCheckpont", "ModelCheckpoint"),
        ("LightningModule", "Module"),
        ("LightningDataModule", "DataModule"),
        ("DeepSpeedStrategy", "strategies.DeepSpeedStrategy"),
    ],
)
def test_a_name_that_there_is_not_is_answered_once_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(lw, name)
    text = "".join(traceback.format_exception(caught.value))
    assert text.lower().count("did you mean") == 1
    assert f"(did you mean {meant!r}?)" in text


def test_whose_a_class_is_does_not_depend_on_the_path_that_it_shows() -> None:
    class Part:
        pass

    Part.__module__ = "loopwright.parts"
    name = Part.__qualname__
    try:
        show_path(Part, "library.parts", "Piece")
        assert (Part.__module__, Part.__name__, Part.__qualname__) == ("library.parts", "Piece", "Piece")
        assert is_core(Part)
        assert origin(Part) == ("loopwright.parts", name)
        assert not is_core(type("Mine", (Part,), {}))
        show_path(Part, "library", "Bit")
    finally:
        restore_paths()
    assert (Part.__module__, Part.__name__) == ("loopwright.parts", "Part")
