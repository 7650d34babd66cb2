from __future__ import annotations

import pytest
import torch

from loopwright.errors import ConfigError
from loopwright.strategies.deepspeed import precision
from loopwright.strategies.deepspeed.precision import DeepSpeedPrecision


@pytest.fixture(autouse=True)
def cpu_without_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_cpu_has_float16", lambda: False)


def test_a_precision_can_be_made_where_the_device_is_not_known() -> None:
    assert DeepSpeedPrecision("16-true").dtype is torch.float16


def test_a_device_that_lacks_the_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="avx512_fp16"):
        DeepSpeedPrecision("16-true", "cpu")
