from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopwright.cli.commands.plan import columns_of_tables, plan
from loopwright.planning.table import Plan, Row

PROGRAM = """
import torch
import loopwright as lw

class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(9, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

lw.Trainer(max_steps=1).fit(Net(), torch.utils.data.DataLoader(torch.zeros(4, 9)))
"""


def test_a_plan_says_how_long_the_training_takes_and_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    options = ["--tokens", "1e12", "--peak-flops", "1e9", "--mfu", "0.5", "--price-per-hour", "3"]
    assert plan([str(program), *options, "--json"]) == 0
    length = json.loads(capsys.readouterr().out)["training"]
    hours = 6 * 10 * 1e12 / (1e9 * 0.5) / 3600
    assert length == {
        "parameters": 10, "tokens": 1e12, "compute_optimal_tokens": 200, "flops": 6 * 10**13, "devices": 1,
        "hours": pytest.approx(hours), "cost": pytest.approx(3 * hours),
    }  # fmt: skip
    assert plan([str(program), *options, "--parameters", "5"]) == 0
    assert f"On 1 device: {hours / 2:,.1f} hours, {1.5 * hours:,.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--price-per-hour", "3"], "Expected --tokens with --price-per-hour"),
        (["--tokens", "1e9", "--price-per-hour", "3"], "Expected --peak-flops"),
        (["--tokens", "1e9", "--mfu", "40"], "at most 1, got 40"),
    ],
)
def test_options_are_checked_before_the_program_runs(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(["none.py", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_program_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["trian.py", "--devices", "8"]) == 2
    assert "Expected a program, got 'trian.py', which does not exist in" in capsys.readouterr().err


def test_a_narrow_terminal_gets_two_tables_without_cut_columns() -> None:
    held = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "gathered"), 123.45e6)
    names = ("ddp", "fsdp + checkpointing", "mesh:fsdp=4,tp=2")
    found = Plan(tuple(Row(name, "", 8, held, sent=2.1e8, memory=8e10) for name in names), 8, 8e10)
    heading, rows = found.cells()
    assert columns_of_tables(found, 200) == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 10]]  # no row has a bubble
    tables = columns_of_tables(found, 80)
    assert [[heading[index] for index in table] for table in tables] == [
        ["strategy", "fits", "peak", "sent/step", "time"],
        ["strategy", "parameters", "gradients", "optimizer", "activations", "gathered"],
    ]
    for table in tables:
        assert sum(max(len(row[index]) for row in [heading, *rows]) + 2 for index in table) - 2 <= 80
