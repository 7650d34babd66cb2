from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.checkpoint import Trusted, Untrusted, load, save, untrust
from loopwright.checkpoint.plain import Unopened, WithObjects
from loopwright.errors import CheckpointError


class Tokenizer:
    def __init__(self, words: list[str]) -> None:
        self.words = words


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def save_trusted(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    # complex is a class that pickle finds wherever the tests are imported from
    save({"hook": {"items": (1, Trusted(range(3)))}, "state_dict": {}}, path)
    return path


def test_trusted_objects_come_back_only_when_allowed(tmp_path: Path) -> None:
    path = save_trusted(tmp_path)
    assert load(path, weights_only=False)["hook"]["items"] == (1, range(3))
    marker = load(path)["hook"]["items"][1]
    assert isinstance(marker, Untrusted)


def test_a_file_with_trusted_objects_opens_in_plain_torch(tmp_path: Path) -> None:
    loaded = torch.load(save_trusted(tmp_path), weights_only=True)
    assert isinstance(loaded["hook"]["items"][1]["__loopwright_trusted__"], bytes)


@pytest.mark.parametrize(
    "use",
    [
        lambda marker: marker.words,
        lambda marker: marker(),
        lambda marker: marker[0],
        lambda marker: list(marker),
        lambda marker: len(marker),
        lambda marker: bool(marker),
    ],
)
def test_any_use_of_an_untrusted_object_says_what_to_do(tmp_path: Path, use: Any) -> None:
    marker = load(save_trusted(tmp_path))["hook"]["items"][1]
    with pytest.raises(CheckpointError, match="weights_only=False") as raised:
        use(marker)
    assert "checkpoint['hook']['items'][1]" in str(raised.value)


def test_an_untrusted_object_can_be_shown_and_saved_again(tmp_path: Path) -> None:
    loaded = load(save_trusted(tmp_path))
    assert "not opened" in repr(loaded["hook"]["items"][1])
    save(loaded, tmp_path / "b.ckpt")
    assert load(tmp_path / "b.ckpt", weights_only=False)["hook"]["items"] == (1, range(3))


def test_a_bomb_in_trusted_never_goes_off_unless_allowed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    save({"a": Trusted(Bomb(mark))}, tmp_path / "a.ckpt")
    load(tmp_path / "a.ckpt")
    load(tmp_path / "a.ckpt", weights_only=None)
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert not mark.exists()
    load(tmp_path / "a.ckpt", weights_only=False)
    assert mark.exists()


def test_trusted_takes_the_object_as_it_is_now(tmp_path: Path) -> None:
    words = ["a"]
    trusted = Trusted(words)
    words.append("b")
    save({"t": trusted}, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt", weights_only=False)["t"] == ["a"]


def test_what_cannot_be_pickled_is_refused_at_once() -> None:
    with pytest.raises(CheckpointError, match="cannot be pickled"):
        Trusted(lambda: None)


def test_a_class_that_is_gone_is_named() -> None:
    stored = {"__loopwright_trusted__": b"cnowhere\nNothing\n."}
    with pytest.raises(CheckpointError, match=r"checkpoint\['a'\].*nowhere"):
        untrust({"a": stored}, allow=True)


def test_a_copy_of_a_checkpoint_keeps_trusted_objects(tmp_path: Path) -> None:
    save(copy.deepcopy({"t": Trusted(range(2))}), tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt", weights_only=False)["t"] == range(2)


def test_untrust_leaves_the_rest_alone() -> None:
    value: dict[str, Any] = {"a": [1, (2, {"x": torch.Size([1])})], "b": {"__loopwright_trusted__": 1}}
    value["self"] = value
    assert untrust(value, allow=True) is value
    assert value["b"] == {"__loopwright_trusted__": 1}


def foreign(tmp_path: Path, **more: Any) -> Path:
    """A file of another program, which pickles objects as they are."""
    path = tmp_path / "foreign.ckpt"
    mark = Bomb(tmp_path / "executed")
    own = {"pytorch-lightning_version": "2.6.6", "hyper_parameters": {"n": 2, "deep": [mark]}}
    torch.save({"state_dict": {"w": torch.ones(2)}, **own, **more}, path)
    return path


def test_objects_of_another_program_stay_closed_and_the_rest_is_read(tmp_path: Path) -> None:
    loaded = load(foreign(tmp_path))
    marker = loaded["hyper_parameters"]["deep"][0]
    assert isinstance(marker, Unopened)
    assert marker.kind == "posix.mkdir"
    assert torch.equal(loaded["state_dict"]["w"], torch.ones(2))
    assert not (tmp_path / "executed").exists()
    with pytest.raises(CheckpointError, match="weights_only=False"):
        len(marker)
    with pytest.raises(CheckpointError, match="posix.mkdir"):
        save(loaded, tmp_path / "again.ckpt")


def test_an_object_among_what_training_continues_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read safely"):
        load(foreign(tmp_path, optimizer_states=[Bomb(tmp_path / "executed")]))
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_with_objects_is_written_as_a_plain_dict_of_them(tmp_path: Path) -> None:
    own = {"pytorch-lightning_version": "2.6.6", "kept": range(3)}
    save(WithObjects(state_dict={}, **own), tmp_path / "a.ckpt")
    written = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert type(written) is dict
    assert written["kept"] == load(tmp_path / "a.ckpt", weights_only=False)["kept"] == range(3)
    assert isinstance(load(tmp_path / "a.ckpt")["kept"], Unopened)
