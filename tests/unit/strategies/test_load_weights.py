"""Names of compiled modules: a file of either kind loads into a module of either kind, in every loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import Net, loader, quiet

import loopwright as lw
from loopwright.errors import CheckpointError


class Plain(Net):
    compiles = False

    def __init__(self) -> None:
        super().__init__()
        self.more: Any = nn.Linear(2, 2)
        if self.compiles:
            self.more = torch.compile(self.more, backend="eager")


class Compiled(Plain):
    compiles = True


def randomized(cls: type[Plain]) -> Plain:
    torch.manual_seed(7)
    module = cls()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name.replace("_orig_mod.", ""): one.flatten().tolist() for name, one in module.named_parameters()}


@pytest.mark.filterwarnings("ignore:trainer.fit has nothing to do")
@pytest.mark.parametrize("is_raw", [False, True], ids=["names of the Trainer", "names of torch"])
@pytest.mark.parametrize("to", [Plain, Compiled])
@pytest.mark.parametrize("of", [Plain, Compiled])
def test_compiled_and_plain_load_into_each_other(
    of: type[Plain], to: type[Plain], is_raw: bool, tmp_path: Path
) -> None:
    module, path = randomized(of), tmp_path / "x.ckpt"
    trainer = quiet(max_epochs=1, limit_train_batches=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    if is_raw:
        content = torch.load(path, weights_only=True)
        torch.save({**content, "state_dict": module.state_dict()}, path)
    expected = values(module)
    assert values(to.load_from_checkpoint(path)) == expected
    assert values(to.load_from_checkpoint(path, strict=False)) == expected
    resumed = to()
    quiet(max_epochs=1, limit_train_batches=1).fit(resumed, loader(), ckpt_path=path)
    assert values(resumed) == expected
    fabric = lw.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    wrapped = fabric.setup(to())
    fabric.load(path, {"state_dict": wrapped})
    assert values(wrapped.module) == expected


def test_a_file_without_any_name_of_the_module_is_refused_also_when_it_need_not_match(tmp_path: Path) -> None:
    torch.save({"state_dict": {"other.weight": torch.ones(1)}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="without any of its names"):
        Plain.load_from_checkpoint(tmp_path / "x.ckpt", strict=False)
