from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rounded_states import Rounded, RoundedMomentum, rounded
from toys import loader, net, quiet

import loopwright as lw
from loopwright.checkpoint import AsyncCheckpointIO
from loopwright.cli import run
from loopwright.errors import CheckpointError
from loopwright.strategies.tensor_subclasses import pack_subclasses, unpack_subclasses

# Any in this file: states, and a tensor subclass's context.


def registered() -> Any:
    return torch.serialization.safe_globals([Rounded])


def fit(max_steps: int, path: Path | None = None, **kwargs: Any) -> lw.Trainer:
    trainer = quiet(max_steps=max_steps, max_epochs=-1, **kwargs)
    trainer.fit(net(optimizer=RoundedMomentum), loader(), ckpt_path=path)
    return trainer


def save(path: Path, max_steps: int = 3, **kwargs: Any) -> None:
    with registered():
        fit(max_steps, **kwargs).save_checkpoint(path)


def states(trainer: lw.Trainer) -> list[Any]:
    module = trainer.lightning_module
    momenta = [entry["momentum"] for entry in trainer.optimizers[0].state.values()]
    assert all(type(one) is Rounded for one in momenta)
    inner = [(one.codes.tolist(), one.scale.tolist()) for one in momenta]
    return [[one.tolist() for one in module.parameters()], inner]


@pytest.mark.parametrize("plugins", [[], [AsyncCheckpointIO]], ids=["now", "in the background"])
def test_a_run_with_such_states_resumes_bit_for_bit(plugins: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save(path, plugins=[one() for one in plugins])
    with registered():
        assert states(fit(7, path)) == states(fit(7))


def test_any_reader_opens_the_file_without_the_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "3.ckpt", tmp_path / "4.ckpt"
    save(one)
    save(other, 4)
    entry = torch.load(one, weights_only=True)["optimizer_states"][0]["state"][0]["momentum"]
    (held,) = entry.values()
    assert held["class"] == "rounded_states.Rounded"
    assert held["context"] == [torch.float32]
    assert held["tensors"]["codes"].dtype is torch.int8
    for command in (["inspect", one], ["verify", one], ["diff", one, one]):
        assert run(["checkpoint", *map(str, command)]) == 0
    assert run(["checkpoint", "diff", str(one), str(other)]) == 1
    assert "momentum" in capsys.readouterr().out


def test_a_class_that_is_not_registered_is_named_and_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save(path)
    with pytest.raises(CheckpointError, match=r"Expected rounded_states\.Rounded.*\n?.*import its package"):
        fit(4, path)


def test_a_fabric_saves_and_loads_them(tmp_path: Path) -> None:
    fabric = lw.Fabric(accelerator="cpu")
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    _, optimizer = fabric.setup(layer, RoundedMomentum(layer.parameters()))
    optimizer.step()
    with registered():
        fabric.save(tmp_path / "x.ckpt", {"optimizer": optimizer})
    expected = [entry["momentum"].codes.tolist() for entry in optimizer.state.values()]
    _, other = fabric.setup(layer, RoundedMomentum(layer.parameters()))
    with registered():
        fabric.load(tmp_path / "x.ckpt", {"optimizer": other})
    assert [entry["momentum"].codes.tolist() for entry in other.state.values()] == expected


def test_weights_of_a_subclass_are_refused_before_the_first_step(tmp_path: Path) -> None:
    module = net()
    module.register_buffer("codes", rounded(torch.ones(2)))
    with pytest.raises(CheckpointError, match=r"1 tensor of a subclass: codes \(rounded_states\.Rounded\)"):
        quiet(max_steps=1, enable_checkpointing=True, default_root_dir=tmp_path).fit(module, loader())
    trainer = quiet(max_steps=1)
    trainer.fit(module, loader())
    assert trainer.global_step == 1


def test_nested_classes_and_plain_states() -> None:
    optimizer = RoundedMomentum([torch.nn.Parameter(torch.ones(2))])
    plain = {"state": {0: {"step": torch.ones(())}}, "param_groups": []}
    assert pack_subclasses(plain, optimizer) is plain
    assert unpack_subclasses(plain, optimizer) is plain
    inner = rounded(torch.arange(4.0))
    state = {"state": {0: {"m": Rounded(inner, torch.ones(()), torch.float32), "rest": [inner, 1]}}}
    with registered():
        packed = pack_subclasses(state, optimizer)
        again = unpack_subclasses(packed, optimizer)["state"][0]
    assert state["state"][0]["rest"][0] is inner
    assert type(again["m"].codes) is Rounded
    assert again["m"].codes.codes is inner.codes
    assert type(again["rest"][0]) is Rounded


@pytest.mark.parametrize(
    "alter", [{"context": [1, 2, 3]}, {"tensors": {}}, {"class": "subprocess.Popen"}, {"class": []}]
)
def test_altered_entries_are_errors(alter: dict[str, Any]) -> None:
    optimizer = RoundedMomentum([torch.nn.Parameter(torch.ones(2))])
    with registered():
        packed = pack_subclasses({"state": {0: {"m": rounded(torch.ones(2))}}}, optimizer)
        (held,) = packed["state"][0]["m"].values()
        held.update(alter)
        with pytest.raises(CheckpointError, match="RoundedMomentum"):
            unpack_subclasses(packed, optimizer)
