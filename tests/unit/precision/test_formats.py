"""Number formats: their limits, and the check of a tensor, against torch's casts, enumeration and bitsandbytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loopwright.errors import ConfigError
from loopwright.precision import FORMATS, check_format
from loopwright.precision.formats import round_to

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float8_e5m2": torch.float8_e5m2, "float8_e4m3": torch.float8_e4m3fn,
}  # fmt: skip


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3"])
def test_limits_are_those_of_all_values(name: str) -> None:
    dtype = DTYPES[name]
    bits = torch.iinfo(torch.int8 if dtype.itemsize == 1 else torch.int16)
    codes = torch.arange(bits.min, bits.max + 1).to(torch.int8 if dtype.itemsize == 1 else torch.int16)
    values = codes.view(dtype).double()
    values = values[values.isfinite() & (values > 0)].unique()
    one = FORMATS[name]
    assert (one.largest, one.smallest) == (values.max(), values.min())
    assert one.epsilon == values[values > 1].min() - 1
    assert one.bits == 8 * dtype.itemsize


def test_tf32_is_float32_with_ten_bits_of_mantissa() -> None:
    values = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-12, 3e38, 2.0**-136, 2.0**-138])
    expected = [1.0, 1 + 2**-10, 1.0, 1 + 2**-9, -1.0, 2.9999e38, 2.0**-136, 0.0]
    found = round_to(values, "tf32").tolist()
    assert found == pytest.approx(expected, rel=2**-11, abs=0)
    assert found[:5] == expected[:5]
    assert round_to(torch.tensor([3.4028e38]), "tf32").item() == float("inf")
    largest = FORMATS["tf32"].largest
    assert round_to(torch.tensor([largest]), "tf32").item() == largest
    assert round_to(torch.tensor([largest * (1 + 2.0**-12)]), "tf32").item() == largest


def test_the_check_counts_what_is_lost() -> None:
    values = torch.tensor([1e5, -1e5, 1e-9, 1.0, 0.0, float("inf"), float("nan"), 2.0])
    found = check_format(values, "float16")
    assert found.overflow == 2 / 6
    assert found.underflow == 1 / 5
    assert found.not_finite == 0.25
    assert found.rounding_error == pytest.approx(1e-9 / 5**0.5)
    assert check_format(values, "bfloat16").overflow == check_format(values, "float32").underflow == 0
    assert check_format(torch.tensor([500.0, 448.0]), "float8_e4m3").overflow == 0.5
    assert check_format(torch.tensor([1e-300], dtype=torch.float64), "float32").underflow == 1
    assert check_format(torch.zeros(3), "nf4").rounding_error == 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_scale_fits_any_range_and_the_error_is_below_half_a_step(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 128, generator=generator)
    found = check_format(values, name)
    if FORMATS[name].block:
        # The largest of 32 values is on average two of them: steps are relative to it.
        assert check_format(values * 2**60, name).rounding_error == pytest.approx(found.rounding_error)
        assert found.overflow == 0
        assert 0 < found.rounding_error < 0.2
    else:
        assert found.rounding_error <= FORMATS[name].epsilon / 2
    rounded = round_to(values, name)
    again = round_to(rounded, name)
    torch.testing.assert_close(again, rounded, rtol=1e-6, atol=0)  # scales of absmax round once more


def test_mx_has_the_values_of_its_elements_in_each_block() -> None:
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * 1e-3
    for name, largest, count in (("mxfp4", 6.0, 15), ("mxfp8", 448.0, 253)):
        rounded = round_to(values, name)
        for block, original in zip(rounded.view(-1, 32), values.view(-1, 32), strict=True):
            power = torch.floor(torch.log2(original.abs().max())) - (2 if name == "mxfp4" else 8)
            elements = block / 2**power
            assert elements.abs().max() <= largest
            assert len(elements.unique()) <= count
            assert torch.equal(elements, elements.to(torch.float8_e4m3fn).float())  # it has the values of e2m1, too


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_are_those_of_bitsandbytes(kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    codes, state = functional.quantize_4bit(values, quant_type=kind, blocksize=64)
    expected: Tensor = functional.dequantize_4bit(codes, state)
    torch.testing.assert_close(round_to(values, kind), expected, rtol=1e-5, atol=1e-6)


def test_the_device_is_read_once() -> None:
    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if any(name in str(function) for name in ("_local_scalar_dense", "nonzero", "equal")):
                reads.append(str(function))
            return function(*args, **(kwargs or {}))

    values = torch.randn(4, 64)
    with Reads():
        for name in FORMATS:
            check_format(values, name)
    assert not reads  # but tolist() at the end, which is one copy and no operation


def test_what_is_no_format_or_has_no_fractions_is_refused() -> None:
    with pytest.raises(ConfigError, match="float16"):
        check_format(torch.ones(1), "float_16")
    with pytest.raises(ConfigError, match=r"torch\.int64"):
        check_format(torch.ones(1, dtype=torch.int64), "int8")
    with pytest.raises(ConfigError, match="shape"):
        check_format(torch.ones(0), "int8")


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "precision.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| ([\d.e+-]+) \| ([\d.e+-]+) \| ([\d.e+-]+) \|", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(FORMATS)
    for name, bits, largest, smallest, epsilon in rows:
        one = FORMATS[name]
        assert int(bits) == one.bits
        assert [f"{value:.3g}" for value in (one.largest, one.smallest, one.epsilon)] == [largest, smallest, epsilon]


@pytest.mark.parametrize("given", [[1.0, 2.0], torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64)])
def test_what_is_no_dense_tensor_of_floats_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="Expected a dense tensor with floating point values, got"):
        check_format(given, "bfloat16")
