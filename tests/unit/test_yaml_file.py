"""YAML of others: reading it ends, with plain values or one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopwright.errors import ConfigError
from loopwright.yaml_file import parse, parse_scalar, read

NESTED = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
MERGED = "".join(f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10))
REFUSED = {
    "aliases of aliases": (f"a0: &a0 [x, x]\n{NESTED}", "more than 200,000 values"),
    "merged aliases": (f"a0: &a0 {{x: 1}}\n{MERGED}", "more than 200,000 values"),
    "brackets": ("[" * 3000 + "]" * 3000, "deeper than 64 levels"),
    "indentation": ("\n".join(" " * n + "a:" for n in range(3000)), "deeper than 64 levels"),
    "a list in itself": ("a: &a [*a]", "contains itself"),
    "a mapping in itself": ("a: &a {b: *a}", "contains itself"),
    "many digits": ("a: " + "9" * 5000, "cannot be read"),
    "many characters": ("a: " + "x" * (1 << 24), "characters"),
    "an object": ("a: !!python/object/apply:os.system [x]", "tag"),
    "another int": ("a: !!int x", "cannot be read"),
    "another bool": ("a: !!bool x", "cannot be read"),
    "another time": ("a: !!timestamp x", "cannot be read"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_document_that_asks_for_too_much_is_an_error(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(text, "the file")
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path / "x.yaml")
    assert parse_scalar(text) == text


def test_aliases_and_merged_keys_are_read() -> None:
    found = parse("base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\nsame: [*base, *base]\n", "the file")
    assert found["more"] == {"a": 1, "b": 3}
    assert found["same"] == [{"a": 1, "b": 2}] * 2
