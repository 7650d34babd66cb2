"""Names as people read them."""

from __future__ import annotations

import pytest

from loopwright.report.names import natural, short_names


def test_numbers_are_in_their_order() -> None:
    names = ["layer10", "Layer3", "layer2", "layer2/b", "acc", "layer"]
    assert sorted(names, key=natural) == ["acc", "layer", "layer2", "layer2/b", "Layer3", "layer10"]


def test_any_names_can_be_compared() -> None:
    names = ["1", "a", "1a", "a1", "", "A", "²", "01"]
    backward = list(reversed(names))
    assert sorted(names, key=natural) == sorted(backward, key=natural)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["logs/a/v0", "logs/b/v0"], ["a/v0", "b/v0"]),
        (["logs/a", "logs/a/b"], ["a", "a/b"]),
        (["logs/a"], ["logs/a"]),
        (["same", "same"], ["same", "same"]),
        (["one", "two"], ["one", "two"]),
    ],
)
def test_what_all_names_begin_with_is_left_out(names: list[str], short: list[str]) -> None:
    assert short_names(names) == short
