"""Make the data of these examples from Python's standard library: `python make_data.py [--files N] [--sums N]`.

Writes into runs/data, downloads nothing, and gives the same files each time with one version of Python:

    texts/           source files of the standard library, as .txt
    instruct.jsonl   functions and the first line of their docstrings: instruction, input, output
    instruct.parquet the same records, if pyarrow is installed
    chats.jsonl      conversations about sums: messages
    held_out.jsonl   conversations about other sums, for evaluating
    sums.jsonl       questions about other sums, and answers: for the task sums.yaml
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any  # JSON

INSTRUCTION = "Describe this function in one line."
LONGEST_FUNCTION = 600  # characters


def sources(count: int) -> list[Path]:
    """Return source files of the standard library, spread over the alphabet."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # Files of settings of the machine are not the same everywhere.
    files = sorted(file for file in folder.glob("*.py") if not file.name.startswith("_sysconfig"))
    count = min(count, len(files))
    return [files[at * len(files) // count] for at in range(count)]


def functions(file: Path) -> Iterator[dict[str, str]]:
    """Give a record for each short function with a docstring."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or not (described := ast.get_docstring(node)):
            continue
        docstring = node.body[0]
        before = lines[node.lineno - 1 : docstring.lineno - 1]
        after = lines[docstring.end_lineno : node.end_lineno]
        code = textwrap.dedent("\n".join(before + after))
        if after and len(code) <= LONGEST_FUNCTION:
            yield {"instruction": INSTRUCTION, "input": code, "output": described.splitlines()[0].strip()}


def sums(draw: random.Random, count: int, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Give questions and answers; a tenth of all sums is held out, and occurs nowhere else."""
    while count:
        left, right = draw.randint(0, 20), draw.randint(0, 20)
        if ((7 * left + right) % 10 == 0) == held_out:
            count -= 1
            yield f"What is {left} + {right}?", f"{left} + {right} = {left + right}."


def chats(draw: random.Random, count: int, *, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Give conversations of one to three questions."""
    for _ in range(count):
        turns = sums(draw, draw.randint(1, 3), held_out=held_out)
        yield {
            "messages": [
                {"role": role, "content": text}
                for pair in turns
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
        }


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write one record per line, and return the records."""
    kept = list(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    print(f"{path}: {len(kept)} records")
    return kept


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        print(f"{path}: not written, pyarrow is not installed")
        return
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), str(path))
    print(f"{path}: {len(records)} records")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/data"), help="folder to write")
    parser.add_argument("--files", type=int, default=100, help="source files of the standard library")
    parser.add_argument("--sums", type=int, default=3000, help="conversations")
    args = parser.parse_args()

    files = sources(args.files)
    (args.out / "texts").mkdir(parents=True, exist_ok=True)
    for file in files:
        (args.out / "texts" / f"{file.stem}.txt").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    print(f"{args.out / 'texts'}: {len(files)} files")
    records = write_lines(args.out / "instruct.jsonl", (record for file in files for record in functions(file)))
    write_parquet(args.out / "instruct.parquet", records)
    write_lines(args.out / "chats.jsonl", chats(random.Random(1), args.sums))
    few = max(20, args.sums // 20)
    write_lines(args.out / "held_out.jsonl", chats(random.Random(2), few, held_out=True))
    pairs = sums(random.Random(3), few, held_out=True)
    write_lines(args.out / "sums.jsonl", ({"question": question, "answer": answer} for question, answer in pairs))


if __name__ == "__main__":
    main()
