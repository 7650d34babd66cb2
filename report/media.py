"""Logged images, texts and histograms: from the folders of loggers that write files, and from TensorBoard's events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .names import natural

__all__ = [
    "HISTOGRAM",
    "IMAGE",
    "TEXT",
    "Bin",
    "Media",
    "chosen",
    "kind_of_image",
    "media_of_value",
    "read_media_folder",
]

IMAGE, TEXT, HISTOGRAM = "image", "text", "histogram"
Bin = tuple[float, float, float]  # lower edge, upper edge, count
_PICTURE = re.compile(r"(-?\d+)-(\d+)\.png$")
_TEXT_FILE = re.compile(r"(-?\d+)\.txt$")
_MAGIC = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}
_MOST_STEPS = 8
Message: TypeAlias = Any  # a protobuf message


@dataclass(frozen=True)
class Media:
    """One logged image, text or histogram.

    Attributes:
        kind: `IMAGE`, `TEXT` or `HISTOGRAM`.
        name: The name under which it was logged; with several images, it ends in "/" and the number.
        step: When it was logged.
        content: A picture's bytes, a text, or a histogram's bins.
        caption: Of a picture.
    """

    kind: str
    name: str
    step: int
    content: bytes | str | tuple[Bin, ...]
    caption: str = ""


def read_media_folder(folder: Path) -> list[Media]:
    """Return what `log_image` and `log_text` wrote below a run's folder; files that cannot be read are left out."""
    found = []
    root = folder / "media"
    for path in sorted(root.rglob("*")):
        key = path.parent.relative_to(root).as_posix()
        try:
            if match := _PICTURE.fullmatch(path.name):
                step, number = match.groups()
                several = (path.parent / f"{step}-1.png").exists()
                text = path.with_suffix(".txt")
                caption = text.read_text(encoding="utf-8", errors="replace") if text.exists() else ""
                found.append(Media(IMAGE, f"{key}/{number}" if several else key, int(step), path.read_bytes(), caption))
            elif match := _TEXT_FILE.fullmatch(path.name):
                found.append(Media(TEXT, key, int(match[1]), path.read_text(encoding="utf-8", errors="replace")))
        except OSError:
            continue
    return found


def media_of_value(value: Message, step: int) -> Media | None:
    """Return the image, text or histogram of a value in TensorBoard's events; None for a scalar and anything else."""
    if value.HasField("image"):
        return Media(IMAGE, value.tag, step, bytes(value.image.encoded_image_string))
    if value.HasField("histo"):
        return Media(HISTOGRAM, value.tag, step, tuple(_bins(value.histo)))
    plugin = value.metadata.plugin_data.plugin_name
    if plugin == "text" and value.HasField("tensor") and value.tensor.string_val:
        name = value.tag.removesuffix("/text_summary")
        return Media(TEXT, name, step, value.tensor.string_val[0].decode("utf-8", errors="replace"))
    return None


def _bins(histogram: Message) -> Iterator[Bin]:
    lower = histogram.min
    for upper, count in zip(histogram.bucket_limit, histogram.bucket, strict=False):
        edge = min(max(upper, lower), histogram.max)
        if count > 0 and edge >= lower:
            yield (lower, edge, count)
        lower = edge


def kind_of_image(content: bytes) -> str | None:
    """Return the media type of a picture's bytes; None if browsers would not show it."""
    return next((kind for magic, kind in _MAGIC.items() if content.startswith(magic)), None)


def chosen(items: Iterable[Media]) -> dict[tuple[str, str], list[Media]]:
    """Return what is shown, by kind and name: some steps of each, including the first and the last, without copies.

    The caption that TensorBoard keeps as a text beside a picture becomes the picture's.
    """
    by_step: dict[tuple[str, str], dict[int, Media]] = {}
    for item in items:
        by_step.setdefault((item.kind, item.name), {}).setdefault(item.step, item)
    for name in [name for kind, name in by_step if kind == TEXT and name.endswith("/caption")]:
        pictures = by_step.get((IMAGE, name.removesuffix("/caption")))
        if pictures is None:
            continue
        for step, text in by_step.pop((TEXT, name)).items():
            if step in pictures and not pictures[step].caption:
                one = pictures[step]
                pictures[step] = Media(IMAGE, one.name, step, one.content, str(text.content))
    keys = sorted(by_step, key=lambda key: ((IMAGE, TEXT, HISTOGRAM).index(key[0]), natural(key[1])))
    return {key: _spread([by_step[key][step] for step in sorted(by_step[key])]) for key in keys}


def _spread(items: Sequence[Media]) -> list[Media]:
    if len(items) <= _MOST_STEPS:
        return list(items)
    return [items[number * (len(items) - 1) // (_MOST_STEPS - 1)] for number in range(_MOST_STEPS)]
