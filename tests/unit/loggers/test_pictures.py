from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from loopwright.errors import ConfigError
from loopwright.loggers.pictures import read_pictures, to_png


@pytest.mark.parametrize(
    "image",
    [
        torch.full((3, 2, 5), 0.5),
        torch.full((1, 2, 5), 0.5, dtype=torch.bfloat16, requires_grad=True),
        torch.full((2, 5), 128, dtype=torch.uint8),
        np.full((2, 5), 0.5),
        np.full((2, 5, 3), 128, dtype=np.uint8),
        Image.new("RGB", (5, 2), (128, 128, 128)),
        Image.new("L", (5, 2), 128),
    ],
)
def test_what_counts_as_a_picture_becomes_bytes_with_the_channels_last(image: Any) -> None:
    ((pixels, options),) = read_pictures("x", image, {})
    assert (pixels.shape, pixels.dtype, options) == ((2, 5, 3), np.uint8, {})
    assert (pixels == 128).all()
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(to_png(pixels)))), pixels)


def test_floats_outside_of_0_and_1_are_clamped() -> None:
    ((pixels, _),) = read_pictures("x", torch.tensor([[-1.0, 2.0, float("nan")]]), {})
    assert pixels[0, :, 0].tolist() == [0, 255, 0]


@pytest.mark.parametrize("image", ["text", None, torch.zeros(2), torch.zeros(2, 3, 4, 5), np.zeros((0, 2)), 3])
def test_what_is_no_picture_is_named(image: Any) -> None:
    with pytest.raises(ConfigError, match="'x'"):
        read_pictures("x", image, {})


@pytest.mark.parametrize("caption", [["one"], "one", 5])
def test_options_need_one_entry_per_picture(caption: Any) -> None:
    with pytest.raises(ConfigError, match="caption"):
        read_pictures("x", [torch.zeros(2, 2)] * 2, {"caption": caption})
