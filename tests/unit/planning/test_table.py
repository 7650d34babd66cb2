"""The table of a plan: which rows fit, which is chosen, and what it says."""

from __future__ import annotations

import json

import pytest

from loopwright.errors import ConfigError
from loopwright.planning.table import Plan, Row, read_size, show_size


def row(name: str, peak: float, *, devices: int = 4, is_complete: bool = True) -> Row:
    held = {"parameters": peak}
    return Row(name, f'strategy="{name}"', devices, held, sent=1e9, memory=100e9, is_complete=is_complete)


def test_a_row_fits_with_a_tenth_to_spare() -> None:
    assert row("ddp", 90e9).fits
    assert not row("ddp", 91e9).fits
    assert row("ddp", 120e9).spare == -20e9
    assert Row("ddp", "", 2, {}).fits is None


def test_the_first_row_with_all_devices_that_fits_is_chosen() -> None:
    plan = Plan((row("single_device", 10e9, devices=1), row("ddp", 95e9), row("fsdp", 40e9)), 4, 100e9)
    assert plan.best is plan.rows[2]
    assert 'Write: lw.Trainer(strategy="fsdp", devices=4)' in str(plan)
    assert "no, only 5.00 GB left" in str(plan)


def test_a_row_without_activations_is_not_chosen() -> None:
    assert Plan((row("ddp", 1e9, is_complete=False),), 4, 100e9).best is None


def test_where_nothing_fits_the_table_says_what_would_help() -> None:
    text = str(Plan((row("ddp", 200e9), row("fsdp", 150e9)), 4, 100e9, left_out={"mesh:tp=3": "3 heads"}))
    assert "no, 50.00 GB lack" in text
    assert "The least is fsdp with 150.00 GB" in text
    assert "mesh:tp=3 is left out: 3 heads" in text


def test_a_plan_is_json() -> None:
    found = json.loads(json.dumps(Plan((row("ddp", 10e9),), 4, 100e9).to_dict()))
    assert found["best"] == "ddp"
    assert found["rows"][0]["peak"] == 10e9
    assert found["rows"][0]["seconds"] == 0.02


SIZES = [("80GB", 80e9), ("16 GiB", 2**34), ("50GB/s", 50e9), (1024, 1024), ("1.5kb", 1500)]


@pytest.mark.parametrize(("text", "size"), SIZES)
def test_sizes_are_read(text: str | float, size: float) -> None:
    assert read_size(text) == size


def test_another_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="got '80 gigs'"):
        read_size("80 gigs")
    assert show_size(0) == "0 B"


def test_of_the_first_kind_that_fits_the_row_that_sends_least_is_chosen() -> None:
    sent = {"fsdp": 1e6, "mesh:fsdp=4,tp=2": 9e9, "mesh:tp=8": 5e9, "mesh:pp=2,fsdp=4": 1e6}
    rows = [Row(name, "", 8, {"parameters": 1e9}, sent=size, memory=80e9) for name, size in sent.items()]
    assert Plan(tuple(rows), 8, 80e9).best is rows[0]
    assert Plan(tuple(rows[1:]), 8, 80e9).best is rows[2]
    assert [one.kind for one in rows] == ["fsdp", "tp", "tp", "pp"]
