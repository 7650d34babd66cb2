from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.strategies import DeepSpeedStrategy
from loopwright.strategies.deepspeed.builds import missing_for
from loopwright.strategies.deepspeed.ops import operators_of, prepare, takes_cpu_adam


@pytest.fixture(autouse=True)
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


@pytest.fixture
def no_libaio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-laio*) exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def on_disk(path: Any, section: str = "offload_optimizer") -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, section: {"device": "nvme", "nvme_path": str(path)}}}


def test_a_configuration_says_what_is_to_be_built() -> None:
    adam = {"optimizer": {"type": "AdamW"}, "zero_force_ds_cpu_optimizer": True}
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert operators_of({}) == {}
    assert operators_of({"zero_optimization": True}) == {}
    assert operators_of({**adam}) == {}
    assert operators_of({**offload, "optimizer": {"type": "AdamW"}}) == {}
    assert list(operators_of({**adam, **offload})) == ["cpu_adam"]
    assert list(operators_of({**adam, **offload, "optimizer": {"type": "SGD"}})) == []
    assert list(operators_of(on_disk("/x", "offload_param"))) == ["pin_memory", "async_io"]
    assert takes_cpu_adam({**adam, **offload})
    assert not takes_cpu_adam(offload)


@pytest.mark.usefixtures("no_libaio")
def test_all_that_a_disk_lacks_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    config = on_disk(tmp_path / "nowhere")
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(file)}
    with pytest.raises(ConfigError, match="config=") as caught:
        prepare(config, "config=")
    said = str(caught.value)
    assert f"nvme_path='{tmp_path}/nowhere' is not an existing folder" in said
    assert f"nvme_path='{file}' is not an existing folder" in said
    assert "there is no libaio" in said
    assert "apt install libaio-dev" in said


@pytest.mark.usefixtures("no_libaio")
def test_a_folder_that_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nvme_path='/proc/self/fd' cannot be written to"):
        prepare(on_disk("/proc/self/fd"), "config=")


def test_a_missing_compiler_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert missing_for(["cpu_adam"]) == {"C++ compiler (no-such-compiler)": "install g++ (apt install g++)"}
    assert missing_for([]) == {}


class Plain(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [lw.Trainer, lw.Fabric])
def test_a_machine_without_deepspeed_is_refused_by_the_constructor(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.strategies.deepspeed.strategy.find_spec", lambda name: None)
    with pytest.raises(lw.MissingDependency, match=r"(?s)strategy='deepspeed'.*pip install 'loopwright\[deepspeed\]'"):
        make(accelerator="cpu", strategy="deepspeed_stage_3", devices=2)


@pytest.mark.usefixtures("no_libaio")
def test_fit_is_refused_before_processes_start(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    strategy = DeepSpeedStrategy(
        stage=3, offload_optimizer=True, offload_optimizer_device="nvme", nvme_path=str(tmp_path)
    )
    trainer = lw.Trainer(accelerator="cpu", strategy=strategy, devices=2, logger=False, enable_progress_bar=False)
    with pytest.raises(ConfigError, match=r"there is no libaio(.|\n)*apt install libaio-dev"):
        trainer.fit(Plain(), DataLoader(torch.zeros(4, 2)))
