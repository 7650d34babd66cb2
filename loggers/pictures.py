"""Conversion of pictures to pixels and PNG bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MissingDependency
from ..files import replace_file
from ..protocols import Options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .base import EachOption, Pictures


def read_pictures(
    key: str, images: Pictures, options: Mapping[str, EachOption]
) -> list[tuple[NDArray[np.uint8], Options]]:
    """Return each picture's pixels, shape (height, width, 3 or 4), bytes, and the options that are its own.

    Args:
        key: Name, for messages.
        images: One picture or a list or tuple of them.
        options: Name -> list with one entry per picture, such as `caption`.

    Raises:
        ConfigError: An item is not a picture, or an option has another length.
    """
    several = list(images) if isinstance(images, (list, tuple)) else [images]
    given = {name: [values] if isinstance(values, str) else values for name, values in options.items()}
    own = options_of_each(f"log_image({key!r}, ...)", len(several), "picture", given)
    return [(_pixels(key, image), of_one) for image, of_one in zip(several, own, strict=True)]


def options_of_each(call: str, count: int, item: str, options: Mapping[str, EachOption]) -> list[Options]:
    """Return the options of each of some items, from lists with one entry per item.

    Args:
        call: How the user called it, for the message.
        count: Number of items.
        item: What an item is called.
        options: Name -> list.

    Raises:
        ConfigError: An option is not a list, or has another length.
    """
    for name, values in options.items():
        if not isinstance(values, (list, tuple)) or len(values) != count:
            raise ConfigError(
                f"{call} got {count} {item}s, and {name}={values!r}.",
                fix=f"pass {name} as a list with one entry per {item}.",
            )
    return [{name: values[number] for name, values in options.items()} for number in range(count)]


def write_pictures(folder: str, step: int, pictures: Iterable[tuple[NDArray[np.uint8], Options]]) -> None:
    """Write pictures as `<step>-<number>.png` into a folder; captions as `.txt` beside them."""
    for number, (pixels, options) in enumerate(pictures):
        stem = os.path.join(folder, f"{step}-{number}")
        with open(f"{stem}.png", "wb") as file:
            file.write(to_png(pixels))
        if options.get("caption"):
            replace_file(f"{stem}.txt", str(options["caption"]))


def to_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels as a PNG file.

    Raises:
        MissingDependency: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingDependency("pillow", needed_for="writing pictures") from None
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png")
    return file.getvalue()


def _pixels(key: str, image: Any) -> NDArray[np.uint8]:  # Any: a tensor, an array, a PIL image
    import numpy as np

    is_tensor = hasattr(image, "detach")
    try:
        array = np.asarray(image.detach().cpu().float() if is_tensor and image.is_floating_point() else image)
    except (TypeError, ValueError, RuntimeError):
        array = np.empty(0, dtype=object)
    if is_tensor and array.ndim == 3:
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or array.dtype.kind not in "uif" or not array.size:
        raise ConfigError(
            f"log_image({key!r}, ...) got {type(image).__name__}"
            + (f" of shape {tuple(image.shape)}" if hasattr(image, "shape") else "")
            + ", which is not a picture.",
            fix="pass tensors of shape (C, H, W) or (H, W), arrays of shape (H, W, C) or (H, W), with C = 1, 3 or 4, "
            "floats from 0 to 1 or bytes, or PIL images.",
        )
    if array.dtype.kind == "f":
        array = np.nan_to_num(array).clip(0.0, 1.0) * 255.0 + 0.5
    array = array.clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array)
