from __future__ import annotations

import sys
import zlib

import pytest

from loopwright.checkpoint.file import digest


@pytest.mark.parametrize("is_installed", [True, False])
def test_it_is_the_crc32_of_zlib_also_in_pieces(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_installed:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    digest._crc32.cache_clear()
    try:
        assert (digest._crc32() is zlib.crc32) is not is_installed
        content = memoryview(bytearray(range(256)) * 1001)
        assert digest.crc32(content[5:]) == zlib.crc32(content[5:])
        assert digest.crc32(content[70_001:], digest.crc32(content[:70_001])) == zlib.crc32(content)
        assert digest.crc32(b"") == 0
    finally:
        digest._crc32.cache_clear()
