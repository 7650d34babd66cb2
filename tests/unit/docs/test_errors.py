"""docs/guides/errors.md quotes messages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import loopwright

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "errors.md"
# In bold and as code; not those that PyTorch or Python prints.
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*(?! \(Py)", PAGE.read_text(encoding="utf-8"))
ROOMS = ("callbacks", "checkpoint", "data", "fabric", "strategies", "trainer")


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """Return the text of each file, with the parts of a string that stands on several lines joined."""
    package = Path(loopwright.__file__).parent
    files = [file for room in ROOMS for file in (package / room).rglob("*.py")]
    return [re.sub(r"\"\s*\n\s*f?\"", "", file.read_text(encoding="utf-8")) for file in files]


def is_in(message: str, sources: list[str]) -> bool:
    message = message.replace("trainer.fit", "trainer. ...")  # the verb is a value
    fragments = [re.escape(part.strip()) for part in message.split("...")]
    return any(re.search(".*".join(fragments), text) for text in sources)


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_package(message: str, sources: list[str]) -> None:
    assert is_in(message, sources), f"docs/guides/errors.md quotes what is not printed: {message}"


def test_a_message_that_is_not_printed_is_found(sources: list[str]) -> None:
    assert len(QUOTED) > 15
    assert not is_in("configure_optimizers makes an optimizer of ... layers", sources)
