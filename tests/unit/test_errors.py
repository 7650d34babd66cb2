"""Misspelt keywords of classes that users construct."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from toys import Net, adam, quiet

import loopwright as lw
from loopwright.errors import add_nearest


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


class Misspells(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0, progbar=True)  # type: ignore[call-arg]  # it is wrong


def text_of(error: BaseException) -> str:  # from Python 3.13 on, Python's own message has the name
    add_nearest(error)
    add_nearest(error)
    lines = [str(error), *getattr(error, "__notes__", ())]
    assert len(lines) == len(set(lines))
    return "\n".join(lines)


class Fabric(lw.Fabric):
    """A subclass of the same name, which inherits its methods, as those for other libraries' programs do."""


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [(lw.seed_everything, "sed", "seed"), (lw.Trainer.fit, "modle", "model"), (lw.Fabric.setup, "modul", "module"),
     (lw.Fabric.load, "stat", "state"), (lw.Fabric.save, "pth", "path"), (lw.Module.log_dict, "on_steps", "on_step"),
     (lw.plan, "device", "devices"), (lw.preview_schedule, "modle", "model")],
)  # fmt: skip
def test_a_misspelt_keyword_of_a_function_names_the_nearest(call: Any, wrong: str, right: str) -> None:
    with pytest.raises(TypeError) as caught:
        call(**{wrong: 1})
    assert f"id you mean '{right}'" in text_of(caught.value)


def test_a_run_that_ends_with_a_misspelt_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError) as caught:
        quiet(max_steps=1).fit(Misspells(adam), [torch.zeros(1)])
    assert "id you mean 'prog_bar'" in text_of(caught.value)


class Profiler:
    """A class with the name of one of Loopwright's."""

    def profile(self, action: int) -> None:
        """Do nothing."""


def calls_wrongly(name: str) -> None:
    lw.seed_everything(seed=Profiler().profile(acton=name))  # type: ignore[call-arg, func-returns-value]  # it is wrong


@pytest.mark.parametrize("call", [Profiler().profile, calls_wrongly])
def test_functions_of_users_are_left_to_python(call: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        call(acton="it")
    add_nearest(caught.value)
    assert not hasattr(caught.value, "__notes__")


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
