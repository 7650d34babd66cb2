from __future__ import annotations

import re
from typing import Any

import pytest

from loopwright.errors import ConfigError
from loopwright.strategies.mesh.axes import MeshAxes, read_axes


def test_the_axis_of_size_minus_one_takes_the_processes_that_are_left() -> None:
    axes = MeshAxes(pp=2, fsdp=-1, tp=2).resolve(12)
    assert (axes.fsdp, axes.world_size, axes.data_size) == (3, 12, 3)
    assert MeshAxes(dp=2, fsdp=2).resolve(4) == MeshAxes(dp=2, fsdp=2)


def test_sizes_that_do_not_multiply_to_the_number_of_processes_are_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("Expected 12 processes for the mesh pp=2, fsdp=2, tp=3 (2 x 2 x")):
        MeshAxes(pp=2, fsdp=2, tp=3).resolve(8)
    with pytest.raises(ConfigError, match=r"Expected a multiple of 3 processes for the mesh .*, got 8"):
        MeshAxes(fsdp=-1, tp=3).resolve(8)


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"tp": 0, "pp": -2, "ep": -1}, r"got pp=-2, tp=0, ep=-1"),
        ({"dp": -1, "fsdp": -1}, r"at most one mesh axis of size -1, got dp, fsdp"),
        ({"dp": 2.0}, r"got dp=2\.0"),
        ({"dp": True}, r"got dp=True"),
        ({"fsdp": 4, "ep": 3}, r"ep to divide fsdp, got ep=3 and fsdp=4"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        MeshAxes(**sizes)


def test_experts_are_compared_with_the_processes_that_are_left() -> None:
    with pytest.raises(ConfigError, match="ep to divide fsdp, got ep=3 and fsdp=4"):
        MeshAxes(fsdp=-1, ep=3).resolve(4)


def test_neighbors_differ_on_the_last_axis() -> None:
    axes = MeshAxes(pp=2, dp=2, fsdp=2, cp=1, tp=2)
    assert axes.coordinates(0) == {"pp": 0, "dp": 0, "fsdp": 0, "cp": 0, "tp": 0}
    assert axes.coordinates(1) == {"pp": 0, "dp": 0, "fsdp": 0, "cp": 0, "tp": 1}
    assert axes.coordinates(13) == {"pp": 1, "dp": 1, "fsdp": 0, "cp": 0, "tp": 1}
    assert [axes.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2


def test_a_text_is_read_as_sizes() -> None:
    assert read_axes("fsdp=2, tp=-1") == {"fsdp": 2, "tp": -1}
    wrong = r"'tpp' is not an axis \(did you mean 'tp'\?\).*'pp' is given twice.*'2' is not"
    with pytest.raises(ConfigError, match=wrong):
        read_axes("tpp=2,pp=1,pp=2,2")
