"""Records of files of each format, with their places, and what is wrong with damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopwright.recipes.data.sources import find_files, read_records

ROWS = [{"text": f"text {number}"} for number in range(5)]


def write(path: Path) -> Path:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)
    elif path.name == "list.json":
        path.write_text(json.dumps(ROWS))
    else:
        path.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    return path


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("a.jsonl", ["1", "3", "5", "7", "9"]),
        ("lines.json", ["1", "3", "5", "7", "9"]),
        ("list.json", [f"item {number}" for number in range(1, 6)]),
        ("a.parquet", [f"row {number}" for number in range(1, 6)]),
    ],
)
def test_records_of_each_format_are_equal_and_know_their_places(tmp_path: Path, name: str, places: list[str]) -> None:
    file = write(tmp_path / name)
    records = list(read_records(file))
    assert [record.value for record in records] == ROWS
    assert [record.place for record in records] == [f"{file}:{place}" for place in places]
    assert not any(record.problem for record in records)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_bytes(b"\xef\xbb\xbfa = 1\r\nb = 2\r\n")
    (record,) = read_records(file)
    assert record.value == {"text": "a = 1\nb = 2\n"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', ":2 Expected a JSON object in one line, got Expecting value at column 7."),
        ("a.jsonl", b'{"a": 1}\n"\xff"\n', ":2 Expected UTF-8 text, got byte 0xff at offset 1."),
        ("a.json", b'[{"a": 1},\n{"a" 2}]', ":2 Expected a JSON list of objects, got Expecting ':' delimiter at col"),
        ("a.txt", b"one\ntwo \xff", ":2 Expected UTF-8 text, got byte 0xff at offset 8."),
        ("a.jsonl", b"[" * 100_000, ":1 Expected JSON of some levels, got one that is nested too deeply."),
        ("a.json", b"[" * 100_000, " Expected JSON of some levels, got one that is nested too deeply."),
        ("a.jsonl", b"9" * 5000, ":1 Expected numbers that can be read, got one of too many digits"),
        ("a.jsonl", b'{"a": 1}\n{"b": {"a": 1, "a": 2}}', ":2 Expected each key once, got 'a' twice"),
        ("a.json", b'[{"a": 1}, [{"a": 1, "a": 2}]]', ":item 2 Expected each key once, got 'a' twice"),
        ("a.jsonl", b'{"a": "\\u00e4 \\ud83d\\ude00"}\n{"a": "\\ud83d"}', ":2 Expected full characters, got \\ud83d"),
        ("a.parquet", b"nothing", ":row 1 Expected a parquet file, got one that is damaged"),
    ],
)
def test_a_damaged_record_has_a_place_and_a_problem(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    (record,) = [record for record in read_records(file) if record.problem]
    assert f"{record.place} {record.problem}".startswith(f"{file}{expected}")


def test_records_after_a_damaged_line_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n{\n{"a": 3}\n')
    assert [record.value for record in read_records(file)] == [{"a": 1}, None, {"a": 3}]


def test_a_folder_gives_its_files_of_records_in_order_or_else_its_texts(tmp_path: Path) -> None:
    for name in ("b/two.md", "a.txt", "b/.hidden.txt", ".git/x.py", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    files, problem = find_files(tmp_path)
    assert ([str(file.relative_to(tmp_path)) for file in files], problem) == (["a.txt", "b/two.md"], "")
    (tmp_path / "b" / "c.jsonl").write_text("{}")
    assert find_files(tmp_path)[0] == [tmp_path / "b" / "c.jsonl"]


def test_a_path_without_data_is_a_problem(tmp_path: Path) -> None:
    assert find_files(tmp_path / "none")[1].endswith("got a path that does not exist.")
    assert find_files(tmp_path)[1].endswith("got a folder without any.")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz", "a.XLSX"])
def test_a_file_of_another_format_is_not_read_as_a_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("instruction,output\n")
    files, problem = find_files(tmp_path / name)
    assert not files
    assert f"Expected jsonl, json, parquet or text, got {Path(name).suffix}" in problem
    (tmp_path / "README").write_text("a text without a suffix")
    assert find_files(tmp_path / "README") == ([tmp_path / "README"], "")


def test_null_keys_of_parquet_files_are_absent(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"messages": [{"a": 1, "call": {"x": 1}}]}, {"messages": [{"a": None, "call": {"y": "z"}}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [record.value for record in read_records(tmp_path / "a.parquet")] == [
        rows[0],
        {"messages": [{"call": {"y": "z"}}]},
    ]


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"text": f"a line of text, number {n}"} for n in range(400)]), path)
    content = bytearray(path.read_bytes())
    content[100:400] = bytes(300)
    path.write_bytes(content)
    assert "got one that is damaged" in list(read_records(path))[-1].problem
