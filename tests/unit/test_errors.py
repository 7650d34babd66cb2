"""Misspelt keywords of classes that users construct."""

from __future__ import annotations

import copy
import inspect
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


def test_signatures_are_those_of_the_constructors() -> None:
    class Sized:
        def __init__(self, size: int) -> None:
            self.size = size

    class Bare(lw.Callback):
        pass

    class Mixed(lw.Callback, Sized):
        pass

    class Made(lw.Callback):
        def __new__(cls, size: int) -> Made:
            return super().__new__(cls)

        def __call__(self, text: str) -> None: ...

    shown = {one: list(inspect.signature(one).parameters) for one in (lw.Callback, Bare, Mixed, Made, Made(1))}
    assert list(shown.values()) == [[], [], ["size"], ["size"], ["text"]]
    assert Mixed(3).size == 3
