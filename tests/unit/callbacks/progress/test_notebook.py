"""An executed notebook keeps what a run told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

_CELL = """
import torch
import loopwright as lw
from torch.utils.data import DataLoader


class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


bar = lw.{bar}()
trainer = lw.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_model_summary=False, callbacks=[bar])
trainer.fit(Net(), DataLoader(torch.ones(6, 4), batch_size=2))
"""


@pytest.mark.slow  # starts a kernel
@pytest.mark.parametrize("bar", ["RichProgressBar", "TQDMProgressBar"])
@pytest.mark.filterwarnings("ignore")  # of jupyter's packages
def test_a_saved_notebook_has_the_last_line_and_what_was_told(bar: str, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(_CELL.replace("{bar}", bar))])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", resources=resources).execute()
    streams = {"stdout": "", "stderr": ""}
    for output in notebook.cells[0].outputs:
        if output.output_type == "stream":
            streams[output.name] += output.text
    assert streams["stdout"].splitlines()[-1].startswith("Epoch 1/1 | step 6 | ")
    assert "loss=" in streams["stdout"].splitlines()[-1]
    assert "Training ended after 2 epochs, 6 steps" in streams["stderr"]


@pytest.mark.slow  # starts a kernel
@pytest.mark.filterwarnings("ignore")  # of jupyter's packages
def test_an_error_in_a_notebook_shows_the_users_frames_only(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    failing = "Net.training_step = lambda self, batch, batch_idx: self.there_is_none\n"
    cell = nbformat.v4.new_code_cell(_CELL.replace("{bar}", "RichProgressBar").replace("bar = ", failing + "bar = "))
    notebook: Any = nbformat.v4.new_notebook(cells=[cell])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources=resources, allow_errors=True
    ).execute()
    (shown,) = [one for one in notebook.cells[0].outputs if one.output_type == "error"]
    text = "\n".join(shown.traceback)
    assert shown.ename == "AttributeError"
    assert "there_is_none" in text
    assert "train_window" not in text
