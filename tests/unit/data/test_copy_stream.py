"""Copies beside the computation: in which order things happen, and that no tensor is left unguarded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from loopwright.data import move_to_device
from loopwright.data.copy_stream import CopyStream

META = torch.device("meta")


class Streams:
    """Stands for torch.cuda, and writes down what happens. The device "meta" stands for a GPU."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.active = "current"

    def Stream(self, device: torch.device) -> str:
        return "side"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.active = stream
        yield
        self.active = "current"

    def current_stream(self, device: torch.device) -> Any:
        assert self.active == "current"
        return self

    def wait_stream(self, stream: str) -> None:
        self.events.append(f"current waits for {stream}")

    def move(self, batch: Any) -> Any:
        self.events.append(f"copy on {self.active}")
        return move_to_device(batch, META)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: streams.events.append(f"keep {tuple(tensor.shape)}")
    )
    return streams


def test_the_current_stream_waits_and_memory_is_kept_for_it(streams: Streams) -> None:
    move = CopyStream(streams.move, META, streams)
    moved = move({"x": torch.zeros(2), "y": ["text", (torch.zeros(3),)]})
    assert moved["y"][1][0].device == META
    assert streams.events == ["copy on side", "current waits for side", "keep (2,)", "keep (3,)"]


def test_a_packed_sequence_keeps_its_sizes_on_the_host(streams: Streams) -> None:
    moved = CopyStream(streams.move, META, streams)(pack_sequence([torch.zeros(2), torch.zeros(1)]))
    assert moved.batch_sizes.device.type == "cpu"
    assert streams.events == ["copy on side", "current waits for side", "keep (3,)"]


class Graph:
    def to(self, device: torch.device) -> Graph:
        return self


@pytest.mark.parametrize(
    "batch", [{"x": torch.zeros(1), "graph": Graph()}, [torch.zeros(1), torch.zeros(1, device="meta")], ["text"]],
    ids=["moves_itself", "on_the_device", "no_tensor"],
)  # fmt: skip
def test_what_cannot_be_guarded_is_moved_on_the_current_stream(batch: Any, streams: Streams) -> None:
    CopyStream(streams.move, META, streams)(batch)
    assert streams.events == ["copy on current"]


@pytest.mark.gpu
def test_batches_are_complete_while_the_device_computes() -> None:
    device = torch.device("cuda")
    move = CopyStream(lambda batch: move_to_device(batch, device), device)
    weight = torch.randn(2048, 2048, device=device)
    sums = []
    for number in range(30):
        (batch,) = move([torch.full((2048, 2048), float(number)).pin_memory()])
        for _ in range(4):
            weight = torch.nn.functional.normalize(weight @ weight)
        sums.append(batch.sum())  # read late: its memory must not have been given to a later batch
    assert [value.item() / 2048**2 for value in sums] == [float(number) for number in range(30)]
