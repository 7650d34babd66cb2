from __future__ import annotations

import pytest
import torch
from torch import nn

from loopwright.strategies import DeepSpeedStrategy
from loopwright.strategies.deepspeed.precision import DeepSpeedPrecision


def test_a_norm_that_the_cpu_cannot_compute_under_autocast_comes_with_the_remedy() -> None:
    strategy = DeepSpeedStrategy(precision=DeepSpeedPrecision("bf16-mixed", "cpu"))
    module = nn.LayerNorm(2).bfloat16()
    step = strategy.bind_step(module, "forward")
    assert step(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="mixed dtype") as failure:
        step(torch.ones(1, 2))
    assert "precision='bf16-true'" in failure.value.__notes__[0]
