from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeTrainer
from torch import Tensor, nn

import loopwright as lw
from loopwright.callbacks import ModelSummary, RichModelSummary
from loopwright.callbacks.summary.summary import human_count, summarize
from loopwright.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.body[0].bias.requires_grad = False
        self.head = nn.Linear(2, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.example_input_array: Any = None

    def forward(self, x: Tensor, flip: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out if flip is None else out * flip


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0  "), (999, "999  "), (1000, "1.0 K"), (123456, "123 K"), (65_800_000, "65.8 M"), (10**15, "1,000 T")],
)
def test_human_count(number: int, text: str) -> None:
    assert human_count(number) == text


def test_counts_are_those_of_the_module() -> None:
    summary = summarize(Net())
    assert [(layer.name, layer.layer_type, layer.num_parameters) for layer in summary.layers] == [
        ("body", "Sequential", 58),
        ("head", "Linear", 4),
        ("other params", "n/a", 3),
    ]
    assert (summary.total_parameters, summary.trainable_parameters) == (65, 57)
    assert summary.model_size == pytest.approx(65 * 4 / 1e6)


def test_depth() -> None:
    names = [layer.name for layer in summarize(Net(), -1).layers]
    assert names == ["body", "body.0", "body.1", "body.2", "head", "other params"]
    assert [layer.name for layer in summarize(Net(), 2).layers] == names
    assert summarize(Net(), 0).layers == []
    with pytest.raises(ConfigError, match="max_depth"):
        summarize(Net(), -2)


def test_tied_parameters_count_once_and_lazy_ones_not() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    assert summarize(net).total_parameters == 9
    lazy = summarize(nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1), nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))))
    assert lazy.total_parameters == 6
    assert dict(lazy.columns())["Params"] == ["?", "3  ", "3+"]
    assert ("4", "Parameters of lazy layers, not counted: their shapes are not known yet") in lazy.totals()


def test_sizes_and_flops_of_the_example() -> None:
    net = Net()
    net.example_input_array = torch.ones(5, 4)
    summary = summarize(net, -1)
    rows = {layer.name: layer for layer in summary.layers}
    assert (rows["body.0"].in_size, rows["body.0"].out_size) == ([5, 4], [5, 8])
    assert rows["body.0"].flops == 2 * 5 * 4 * 8
    assert rows["body"].flops == 2 * 5 * (4 * 8 + 8 * 2)
    assert summary.total_flops == 2 * 5 * (4 * 8 + 8 * 2 + 2 * 2)
    assert "FLOPs" in str(summary)


@pytest.mark.parametrize("example", [(torch.ones(5, 4), torch.ones(2)), {"x": torch.ones(5, 4), "flip": torch.ones(2)}])
def test_the_example_may_be_arguments(example: Any) -> None:
    net = Net()
    net.example_input_array = example
    assert summarize(net).total_flops > 0


def test_measuring_leaves_no_trace() -> None:
    net = Net()
    net.example_input_array = torch.ones(5, 4)
    net.body[1].eval()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    summarize(net)
    assert torch.equal(torch.rand(2), expected)
    assert (net.training, net.body.training, net.body[1].training) == (True, True, False)
    assert not net.head._forward_hooks
    assert summarize(net).total_training_modes == {"train": 4, "eval": 1}


def test_the_callback_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeTrainer(tmp_path, [ModelSummary()], max_epochs=0).fit(Net())
    assert capsys.readouterr().out.splitlines() == [
        "  | Name         | Type       | Params | Mode",
        "----------------------------------------------",
        "0 | body         | Sequential | 58     | train",
        "1 | head         | Linear     | 4      | train",
        "2 | other params | n/a        | 3      | n/a",
        "----------------------------------------------",
        "57        Trainable params",
        "8         Non-trainable params",
        "65        Total params",
        "0.000     Total size of the parameters (MB)",
        "5         Modules in train mode",
        "0         Modules in eval mode",
    ]


def test_other_ranks_and_depth_0_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = FakeTrainer(tmp_path, [ModelSummary()], max_epochs=0)
    trainer.is_global_zero = False
    trainer.fit(Net())
    FakeTrainer(tmp_path, [ModelSummary(0)], max_epochs=0).fit(Net())
    assert capsys.readouterr().out == ""


def test_rich_writes_plain_text_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeTrainer(tmp_path, [ModelSummary(2)], max_epochs=0).fit(Net())
    plain = capsys.readouterr().out
    FakeTrainer(tmp_path, [RichModelSummary(2)], max_epochs=0).fit(Net())
    assert capsys.readouterr().out == plain


def test_rich_draws_a_table_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", Terminal())
    FakeTrainer(tmp_path, [RichModelSummary()], max_epochs=0).fit(Net())
    text = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "Sequential" in text
    assert "┃" in text
    assert "Total params" in text


def test_a_wrong_depth_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_depth=-2"):
        ModelSummary(-2)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_has_no_sizes_and_stops_nothing() -> None:
    class Scripted(lw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.script = torch.jit.script(nn.Linear(2, 3))
            self.layer = nn.Linear(3, 2)
            self.example_input_array = torch.ones(1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.script(x))

    rows = {layer.name: layer for layer in summarize(Scripted(), max_depth=1).layers}
    assert rows["layer"].in_size == [1, 3]
    assert rows["script"].num_parameters == 9
