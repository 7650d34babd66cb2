from __future__ import annotations

from typing import Any

import pytest

from loopwright.accelerators.base import Accelerator, parse_device_count, parse_device_indices
from loopwright.errors import ConfigError


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (1, [0]),
        (3, [0, 1, 2]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        ("auto", [0, 1, 2, 3]),
        ("Auto", [0, 1, 2, 3]),
        ("2", [0, 1]),
        ("1,", [1]),
        ("0,2", [0, 2]),
        (" 3 , 1 ", [3, 1]),
        ([1], [1]),
        ((2, 0), [2, 0]),
    ],
)
def test_every_form_of_indices(devices: Any, expected: list[int]) -> None:
    assert parse_device_indices(devices, "cuda", range(4)) == expected


@pytest.mark.parametrize(
    "devices",
    [
        0,
        "0",
        [],
        (),
        "",
        ",",
        -2,
        "-2",
        None,
        True,
        False,
        1.0,
        ["0"],
        [0.0],
        [True],
        "x",
        "0,x",
        {0},
        {"a": 1},
        [0, -1],
    ],
)
def test_a_wrong_form_of_indices_is_an_error_that_shows_it(devices: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_device_indices(devices, "cuda", range(4))
    assert f"devices={devices!r}" in str(caught.value)


def test_too_many_devices_says_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match="requests 5 cuda devices, but this machine has 4"):
        parse_device_indices(5, "cuda", range(4))


def test_an_index_that_does_not_exist_lists_the_visible_ones() -> None:
    with pytest.raises(ConfigError, match=r"do not exist: 4, 7(.|\n)*0, 1, 2, 3"):
        parse_device_indices([0, 4, 7], "cuda", range(4))


def test_an_index_named_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="names 1 more than once"):
        parse_device_indices("1,1,0", "cuda", range(4))


def test_no_visible_device_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has none"):
        parse_device_indices(1, "cuda", [])


@pytest.mark.parametrize(("devices", "expected"), [(1, 1), (4, 4), ("2", 2), (" 3 ", 3)])
def test_every_form_of_a_count(devices: Any, expected: int) -> None:
    assert parse_device_count(devices, "cpu") == expected


@pytest.mark.parametrize("devices", [0, "0", -1, "-1", [], [0], "0,1", "1,", True, 1.0, None, "x"])
def test_a_wrong_form_of_a_count_is_an_error_that_shows_it(devices: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_device_count(devices, "cpu")
    assert f"devices={devices!r}" in str(caught.value)


def test_the_base_class_says_nothing_of_a_kind() -> None:
    for call in (Accelerator.name, Accelerator.is_available, Accelerator.auto_device_count):
        with pytest.raises(NotImplementedError):
            call()
    assert Accelerator.auto_priority < 0
