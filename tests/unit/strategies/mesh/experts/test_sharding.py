"""Modules whose experts cannot be shared by the ranks of `ep`; strategies/mesh/experts/sharding.py."""

from __future__ import annotations

import os
import subprocess

import pytest
from expert_models import Mixture, loader
from torch import nn

import loopwright as lw
from loopwright.strategies.mesh.experts.sharding import check_layers


def test_layers_are_named() -> None:
    with pytest.raises(lw.ModuleError, match=r"experts that ep=4 divides, got 6 in blocks.0.moe, 6 in blocks.1.moe\."):
        check_layers(Mixture(num_experts=6), 4)
    check_layers(Mixture(num_experts=6), 3)


def test_a_module_without_experts_is_refused() -> None:
    with pytest.raises(lw.ModuleError, match=r"a layer loopwright.Experts in Linear for ep=2, got none"):
        check_layers(nn.Linear(2, 2), 2)


@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_the_trainer_refuses_before_processes_start(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = lw.Trainer(
        accelerator="cpu", strategy="mesh:fsdp=2,ep=2", devices=2, logger=False, enable_checkpointing=False
    )
    monkeypatch.setattr(subprocess, "Popen", _fail)
    monkeypatch.setattr(os, "fork", _fail)
    with pytest.raises(lw.ModuleError, match=r"got 3 in blocks.0.moe"):
        getattr(trainer, verb)(Mixture(num_experts=3), loader(2))


def _fail(*_: object, **__: object) -> None:
    raise AssertionError("a process was started")
