"""What is checked before processes start: packages that the arguments need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from toys import Net, adam, quiet

import loopwright as lw


def spy(calls: list[str], name: str) -> Callable[..., None]:
    def called(*_: object, **__: object) -> None:
        calls.append(name)
        raise RuntimeError("processes would start")

    return called


def fit(strategy: str, monkeypatch: pytest.MonkeyPatch, *, ckpt_path: str | None = None, **arguments: Any) -> list[str]:
    """Return what was launched."""
    calls: list[str] = []
    trainer = quiet(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, **arguments)
    monkeypatch.setattr(trainer.fabric, "launch", spy(calls, "fabric"))
    monkeypatch.setattr(type(trainer.fabric.launcher), "launch", spy(calls, "launcher"))
    with pytest.raises((lw.MissingDependency, RuntimeError)) as caught:
        trainer.fit(Net(adam), [], ckpt_path=ckpt_path)
    return calls if isinstance(caught.value, RuntimeError) else [caught.value.package]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_packages_are_looked_for_before_processes_start(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("psutil", "s3fs"):
        monkeypatch.setitem(sys.modules, package, None)
    monitors: list[dict[str, Any]] = [{}, {"cpu_stats": True}, {"cpu_stats": False, "network_stats": True}]
    for one in monitors:
        assert fit(strategy, monkeypatch, callbacks=lw.DeviceStatsMonitor(**one), logger="csv") == ["psutil"]
    assert fit(strategy, monkeypatch, ckpt_path="s3://bucket/a.ckpt") == ["s3fs"]
    assert fit(strategy, monkeypatch, default_root_dir="s3://bucket/run") == ["s3fs"]
    started = ["launcher" if strategy == "ddp_spawn" else "fabric"]
    assert fit(strategy, monkeypatch, callbacks=lw.DeviceStatsMonitor(False), logger="csv") == started
    assert fit(strategy, monkeypatch, ckpt_path="of-a-plugin://a.ckpt") == started


def test_constructors_look_for_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(lw.MissingDependency, match="dirpath='s3://bucket/run' needs the package 's3fs'"):
        lw.ModelCheckpoint("s3://bucket/run")
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(lw.MissingDependency, match="ddp_comm_hook='power_sgd' needs the package 'numpy'"):
        lw.strategies.DDPStrategy(ddp_comm_hook="power_sgd")
    assert lw.strategies.DDPStrategy(ddp_comm_hook="bf16").ddp_comm_hook == "bf16"
