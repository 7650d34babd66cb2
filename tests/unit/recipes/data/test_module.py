"""`RecipeData`: prepared, set up and read as the Trainer does it; every sample once, problems all at once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_texts import chat, sentence, small_tokenizer, write_jsonl

import loopwright as lw
from loopwright.data import BatchStream, Shard
from loopwright.recipes.data import DataSettings, RecipeData
from loopwright.recipes.data.sources import read_records


def opened(settings: DataSettings, folder: Path, tokenizer: object = None) -> RecipeData:
    data = RecipeData(settings, tokenizer or small_tokenizer(), folder / "cache")
    data.prepare_data()
    data.setup("fit")
    return data


NAMES = ("input_ids", "labels", "position_ids")


def samples_of(batches: object, pad: int) -> list[tuple[int, ...]]:
    """Return the tokens of each sample in batches: where positions begin again, a new one begins."""
    found = []
    for batch in batches:
        for ids, labels, positions in zip(*(batch[name].tolist() for name in NAMES), strict=True):
            starts = [at for at, position in enumerate(positions) if position == 0]
            for first, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                length = end - first
                while length and ids[first + length - 1] == pad and labels[first + length - 2] == -100:
                    length -= 1
                found.append(tuple(ids[first : first + length]))
    return found


def test_a_batch_holds_samples_with_labels_of_the_next_token_and_positions_that_begin_again(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    records = [chat(number) for number in range(6)]
    data = opened(DataSettings(write_jsonl(tmp_path / "a.jsonl", records), max_length=96), tmp_path, tokenizer)
    (batch,) = [batch for batch in data.train_dataloader() if batch["position_ids"].eq(0).sum() > 1][:1]
    assert list(batch) == [*NAMES, "rows", "lengths"]
    assert sum(int(one["lengths"].sum()) for one in data.train_dataloader()) == data.report.tokens
    assert {(one.dtype, one.shape[0]) for one in batch.values()} == {(torch.int64, 1)}
    texts = {tokenizer.apply_chat_template(one["messages"], tokenize=False): one for one in records}
    ids, labels, positions = (batch[name][0].tolist() for name in NAMES)
    starts = [at for at, position in enumerate(positions) if position == 0]
    for first, end in pairwise(starts):
        record = texts[tokenizer.decode(ids[first:end])]
        trained = [at for at in range(first, end) if labels[at] != -100]
        assert [labels[at] for at in trained] == [ids[at + 1] for at in trained]
        assert tokenizer.decode([labels[at] for at in trained]) == record["messages"][1]["content"] + "<|im_end|>"
        assert labels[end - 1] == -100


@pytest.mark.parametrize("packing", [True, False])
def test_every_sample_is_in_an_epoch_once(tmp_path: Path, packing: bool) -> None:
    tokenizer = small_tokenizer()
    records = [chat(number, turns=1 + number % 3) for number in range(40)]
    settings = DataSettings(
        write_jsonl(tmp_path / "a.jsonl", records), max_length=200, packing=packing, micro_batch=3, seed=5
    )
    data = opened(settings, tmp_path, tokenizer)
    expected = Counter(
        tuple(tokenizer.apply_chat_template(one["messages"], return_dict=True)["input_ids"]) for one in records
    )
    assert Counter(samples_of(data.train_dataloader(), tokenizer.eos_token_id)) == expected
    assert data.report.samples == 40
    assert (data.num_train_rows < 25) == packing


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (3, 2)])
def test_a_resume_on_other_ranks_reads_the_rest_of_the_epoch_once(
    tmp_path: Path, ranks: tuple[int, int], grouped: bool
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(24)])
    settings = DataSettings(path, max_length=128, packing=False, group_by_length=grouped, micro_batch=2)

    def streams(count: int) -> list[BatchStream]:
        loaders = [opened(settings, tmp_path).train_dataloader() for _ in range(count)]
        return [BatchStream(loader, shard=Shard(rank, count)) for rank, loader in enumerate(loaders)]

    (whole,) = streams(1)
    whole.open(1)
    expected = []
    while whole.has_next():
        expected.append(whole.next_batch()["input_ids"].tolist())
    before, after = ranks
    first, second = streams(before), streams(after)
    for stream in first:
        stream.open(1)
    read = [stream.next_batch()["input_ids"].tolist() for stream in first]
    for stream in second:
        stream.load_state_dict(first[0].state_dict())
        stream.reopen()
    while all(stream.has_next() for stream in second):
        read += [stream.next_batch()["input_ids"].tolist() for stream in second]
    assert read == expected[: len(read)]
    assert len(expected) - len(read) < after


def test_epochs_have_different_orders_that_a_seed_repeats(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(30)])

    def order(epoch: int, seed: int) -> list[list[int]]:
        loader = opened(DataSettings(path, packing=False, seed=seed), tmp_path).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return [batch["input_ids"][0].tolist() for batch in loader]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(1, 1)
    assert order(0, 1) != order(0, 2)


def test_documents_are_one_stream_without_packing_and_every_token_is_learned_once(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(9):
        (texts / f"{number}.txt").write_text(sentence(number, 5 + 3 * number))
    data = opened(DataSettings(texts, max_length=16, packing=False), tmp_path, tokenizer)
    stream = [
        token
        for number in range(9)
        for token in [*tokenizer((texts / f"{number}.txt").read_text())["input_ids"], tokenizer.eos_token_id]
    ]
    rows = {}
    for batch in data.train_dataloader():
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        at = next(at for at in range(0, len(stream), 16) if stream[at : at + 16] == ids)
        rows[at] = labels
    learned = [label for at in sorted(rows) for label in rows[at] if label != -100]
    assert learned == stream[1:]


def test_packed_documents_are_apart_and_long_ones_are_split_without_losing_a_label(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    texts = [sentence(1, 60), sentence(2, 4), sentence(3, 9)]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    data = opened(DataSettings(path, max_length=32), tmp_path, tokenizer)
    learned = Counter(
        label for batch in data.train_dataloader() for label in batch["labels"].flatten().tolist() if label != -100
    )
    expected = Counter(token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id][1:])
    assert learned == expected
    assert data.report.split == 1


def test_all_mistakes_are_named_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        json.dumps(chat(1)),
        '{"messages": [',
        json.dumps({"text": "no chat"}),
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}),
        json.dumps({"messages": [{"role": "user", "content": "a"}]}),
    ]
    path.write_text("\n".join(lines))
    data = RecipeData(DataSettings(path), small_tokenizer(), tmp_path / "cache")
    problems = data.problems()
    assert [problem.split(": ")[0] for problem in problems] == [f"{path}:{line}" for line in (2, 3, 4, 5)]
    assert all(problem.split(": ", 1)[1].startswith("Expected ") and ", got " in problem for problem in problems)
    with pytest.raises(lw.errors.ConfigError, match="Expected data to train on"):
        data.prepare_data()


@pytest.mark.parametrize("record", [chat(1), {"instruction": "a", "output": "b"}])
def test_a_template_that_is_missing_is_named_once(tmp_path: Path, record: dict[str, Any]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record] * 5)
    (problem,) = RecipeData(DataSettings(path), small_tokenizer(None), tmp_path / "cache").problems()
    assert problem.startswith(f"{path}:1: Expected a ")


def test_many_mistakes_are_twenty_and_a_count(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 50)
    problems = RecipeData(DataSettings(path), small_tokenizer(), tmp_path / "cache").problems()
    assert len(problems) == 21
    assert problems[-1] == "... and 30 more (50 in all)"


def test_the_report_counts_and_shows_the_first_sample(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(8)])
    data = opened(DataSettings(path, max_length=96, micro_batch=2), tmp_path, tokenizer)
    batches = list(data.train_dataloader())
    report = data.report
    real = sum(len(one) for one in samples_of(batches, tokenizer.eos_token_id))
    assert report.tokens == real
    assert report.padded_tokens == sum(batch["input_ids"].numel() for batch in batches) - real
    assert report.trained_tokens == sum(int((batch["labels"] != -100).sum()) for batch in batches)
    assert report.rows == sum(len(batch["input_ids"]) for batch in batches)
    answer = chat(0)["messages"][1]["content"]
    assert [text for text, is_trained in report.first_sample if is_trained] == [f"{answer}<|im_end|>"]
    full = tokenizer.apply_chat_template(chat(0)["messages"], tokenize=False)
    assert "".join(text for text, _ in report.first_sample) == full


def test_what_is_not_read_of_records_is_noted_once_per_source(tmp_path: Path) -> None:
    records = [{**chat(number), "id": number, "label": number != 3} for number in range(8)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    tokenizer = small_tokenizer()
    report = opened(DataSettings(path, max_length=96), tmp_path, tokenizer).report
    assert report.notes[1:] == [
        f"{path}: Keys of records that are not read: id.",
        f"{path}: 1 record with label=false left out.",
    ]
    assert (report.records, report.samples) == (8, 7)


def test_held_out_records_are_not_trained_on(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(20)])
    data = opened(DataSettings(path, max_length=128, val_fraction=0.25), tmp_path, tokenizer)
    train = samples_of(data.train_dataloader(), tokenizer.eos_token_id)
    val = samples_of(data.val_dataloader(), tokenizer.eos_token_id)
    assert (len(train), len(val)) == (15, 5)
    assert not set(train) & set(val)


def test_a_weight_repeats_a_source_and_a_fraction_takes_a_part(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    often = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(4)])
    seldom = write_jsonl(tmp_path / "b.jsonl", [chat(number) for number in range(10, 20)])
    sources = [{"path": str(often), "weight": 2}, {"path": str(seldom), "weight": 0.5}]
    data = opened(DataSettings(sources, max_length=128), tmp_path, tokenizer)
    counts = Counter(samples_of(data.train_dataloader(), tokenizer.eos_token_id))
    assert sorted(counts.values()) == [1] * 5 + [2] * 4


def test_empty_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"a.txt": "one two three", "b.txt": "", "c.txt": " \n", "d.txt": "four five six"}.items():
        (folder / name).write_text(text)
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": "seven eight"}, {"text": ""}, {"text": None}])
    (tmp_path / "none.json").write_text("")
    data = opened(DataSettings([str(folder), str(lines)], max_length=64), tmp_path)
    assert data.report.samples == 3
    assert data.report.records == 7
    assert [note for note in data.report.notes if "left out" in note] == [
        f"{folder}: 2 records with an empty text left out.", f"{lines}: 2 records with an empty text left out."
    ]  # fmt: skip
    assert list(read_records(tmp_path / "none.json")) == []


def test_bad_records_are_skipped_up_to_a_limit_and_listed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(6)])
    good = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*good[:2], "{broken\n", *good[2:], '{"messages": []}\n']))

    def settings(**changes: object) -> DataSettings:
        return DataSettings(path, **{"max_length": 128, "on_bad_record": "skip", **changes})  # type: ignore[arg-type]

    data = opened(settings(), tmp_path)
    assert data.report.samples == 6
    (note,) = [note for note in data.report.notes if "skipped" in note]
    assert f"2 bad records skipped, listed in {tmp_path}" in note
    assert f"the first: {path}:3: Expected a JSON object in one line, got" in note
    listed = Path(note.partition("listed in ")[2].partition(";")[0]).read_text().splitlines()
    assert [line.partition(": ")[0] for line in listed] == [f"{path}:3", f"{path}:8"]
    assert data.describe_rows(range(data.num_train_rows)).startswith(f"{path}, records ")

    for changes, first in (({"max_bad_records": 1}, "max_bad_records: "), ({"on_bad_record": "error"}, f"{path}:3: ")):
        problems = RecipeData(settings(**changes), small_tokenizer(), tmp_path / "cache").problems()
        assert problems[0].startswith(first)
        assert f"{path}:8: Expected a list of messages, got an empty list." in problems
