"""Misspelt keywords of classes that users construct."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import loopwright as lw


@pytest.mark.parametrize(
    ("make", "wrong", "right"),
    [(lw.ModelCheckpoint, "monitr", "monitor"), (lw.EarlyStopping, "patince", "patience"),
     (lw.CSVLogger, "save_dri", "save_dir"), (lw.SimpleProfiler, "dirpth", "dirpath"), (lw.Fabric, "device", "devices"),
     (lw.strategies.SingleDeviceStrategy, "devce", "device")],
)  # fmt: skip
def test_a_misspelt_keyword_names_the_nearest(make: Any, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"{make.__name__} has no argument {wrong}= \(did you mean '{right}'\?\)"):
        make(**{wrong: 1})


def test_the_error_is_one_of_the_configuration_and_lists_the_arguments() -> None:
    with pytest.raises(lw.ConfigError, match="To fix it: it takes monitor, min_delta, patience"):
        lw.EarlyStopping(monitr="loss")  # type: ignore[call-arg]  # it is wrong


def test_constructors_of_users_are_left_to_python() -> None:
    class Mine(lw.Callback):
        def __init__(self, size: int, **more: int) -> None:
            self.more = more

    class Strict(lw.Callback):
        def __init__(self, size: int) -> None:
            pass

    class Empty(lw.Callback):
        pass

    class Mixed(lw.Callback, str):
        pass

    assert Mine(1, sise=2).more == {"sise": 2}
    with pytest.raises(TypeError, match="unexpected keyword argument 'sise'"):
        Strict(sise=2)  # type: ignore[call-arg]  # it is wrong
    with pytest.raises(TypeError, match="takes no arguments"):
        Empty(sise=2)  # type: ignore[call-arg]  # it is wrong
    assert Mixed("text") == "text"
    stopping = lw.EarlyStopping("loss", patience=7)
    assert [one.patience for one in (copy.deepcopy(stopping), pickle.loads(pickle.dumps(stopping)))] == [7, 7]
