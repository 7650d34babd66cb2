"""Names of packages that are imported on first use, and what is said of a name that there is not."""

from __future__ import annotations

import traceback

import pytest

import loopwright as lw


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ModelCheckpont", "ModelCheckpoint"),
        ("LightningModule", "Module"),
        ("LightningDataModule", "DataModule"),
    ],
)
def test_a_name_that_there_is_not_is_answered_once_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(lw, name)
    text = "".join(traceback.format_exception(caught.value))
    assert text.lower().count("did you mean") == 1
    assert f"(did you mean {meant!r}?)" in text
