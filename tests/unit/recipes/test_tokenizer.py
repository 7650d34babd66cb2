"""Training a tokenizer: what it knows, that it is repeatable, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_texts import chat, sentence, write_jsonl

from loopwright.errors import ConfigError
from loopwright.recipes.tokenizer import TokenizerSettings, train_tokenizer


def texts(folder: Path) -> Path:
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / "texts" / f"{number}.txt").write_text(sentence(number, 20))
    return folder / "texts"


def test_the_folder_is_loaded_with_its_template_and_keeps_any_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    report = train_tokenizer(TokenizerSettings(texts(tmp_path), tmp_path / "out", 300))
    assert (report.vocab_size, report.texts) == (300, 30)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = " Grüße, 世界!\n\tdef f(x): return x  # 1 , 2 's"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 300
    out = tokenizer.apply_chat_template(
        chat(1)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [token for token, mask in zip(out["input_ids"], out["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(trained) == chat(1)["messages"][1]["content"] + tokenizer.eos_token
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_equal_texts_give_equal_files(tmp_path: Path) -> None:
    data = texts(tmp_path)
    for name in ("a", "b"):
        train_tokenizer(TokenizerSettings(data, tmp_path / name, 320))
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert "tokenizer.json" in names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_texts_of_records_count_without_their_roles(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "zzzz", "content": "abab"}]}])
    report = train_tokenizer(TokenizerSettings(path, tmp_path / "out", 300))
    assert (report.texts, report.characters) == (1, 4)


def test_all_problems_are_named_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError) as error:
        train_tokenizer(TokenizerSettings(tmp_path / "none", tmp_path / "out", 100))
    assert [line.split(":")[0] for line in error.value.what.splitlines()[1:]] == [
        "out",
        "vocab_size",
        str(tmp_path / "none"),
    ]


def test_an_empty_corpus_and_broken_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match=r"a.jsonl:1: Expected a JSON object[^\n]*\n.*Expected text, got none"):
        train_tokenizer(TokenizerSettings(tmp_path / "a.jsonl", tmp_path / "out", 300))
    assert not (tmp_path / "out").exists()
