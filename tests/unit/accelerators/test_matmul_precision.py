from __future__ import annotations

import subprocess
import sys

import pytest

import loopwright as lw
from loopwright.errors import ConfigError


def test_it_is_read_and_set_without_a_warning_of_any_torch() -> None:
    # In a fresh process: torch 2.9 warns once.
    program = (
        "from loopwright.accelerators.matmul_precision import get_matmul_precision, set_matmul_precision\n"
        "set_matmul_precision('high')\n"
        "assert get_matmul_precision() == 'high'\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


ROUND_TRIP = """
import torch
from loopwright.accelerators.matmul_precision import (
    capture_matmul_precision, get_matmul_precision, restore_matmul_precision, set_matmul_precision,
)
if {given!r} == "new":
    torch.backends.cuda.matmul.fp32_precision = "tf32"
elif {given!r} == "legacy":
    torch.set_float32_matmul_precision("medium")
before = capture_matmul_precision()
assert get_matmul_precision() == {{"new": "high", "legacy": "medium", "nothing": "highest"}}[{given!r}]
for precision in ("high", "medium", "highest"):
    set_matmul_precision(precision)
    assert get_matmul_precision() == precision
    restore_matmul_precision(before)
    assert capture_matmul_precision() == before, (capture_matmul_precision(), before)
"""


@pytest.mark.parametrize("given", ["new", "legacy", "nothing"])
def test_any_setting_is_put_back_as_it_was(given: str) -> None:
    warnings = "default" if given == "legacy" else "error"  # torch 2.9 warns of the user's own call
    subprocess.run([sys.executable, "-W", warnings, "-c", ROUND_TRIP.format(given=given)], check=True)


RUN = """
import torch
import loopwright as lw
from loopwright.accelerators.matmul_precision import capture_matmul_precision, get_matmul_precision
seen = []
class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        seen.append(get_matmul_precision())
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
torch.backends.cuda.matmul.fp32_precision = "ieee"
before = capture_matmul_precision()
quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lw.Trainer(max_epochs=1, matmul_precision="medium", enable_model_summary=False, **quiet)
assert capture_matmul_precision() == before
trainer.fit(Net(), [torch.ones(1, 2)])
assert seen == ["medium"] and capture_matmul_precision() == before
fabric = lw.Fabric(accelerator="cpu", matmul_precision="high")
fabric.launch(lambda fabric: seen.append(get_matmul_precision()))
fabric.teardown()
assert seen == ["medium", "high"] and capture_matmul_precision() == before
"""


def test_runs_set_it_and_put_it_back() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", RUN], check=True)


def test_other_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="matmul_precision.*'tf32'"):
        lw.Trainer(matmul_precision="tf32")
    with pytest.raises(ConfigError, match="matmul_precision.*'tf32'"):
        lw.Fabric(matmul_precision="tf32")
