"""Loss and perplexity over trained tokens equal those of a handwritten loop; lm-eval runs local tasks."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipe_models import import_libraries
from recipe_texts import chat, sentence, small_tokenizer, write_jsonl
from torch import Tensor
from trained_models import chats, model_folder, open_plain, run_folder

from loopwright.errors import ConfigError
from loopwright.recipes.evaluation.evaluate import EvaluateSettings, evaluate
from loopwright.recipes.exporting.export import export_run

# Any in this file: settings.

COUNT = 10


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_libraries()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("base") / "llama")


def by_hand(folder: Path, *, style: str | None = None) -> tuple[float, int]:
    """Return the sum of losses over the answers of `chats`, one conversation at a time, and the number of tokens."""
    model, tokenizer = open_plain(folder).double(), small_tokenizer()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for number in range(COUNT):
        question, answer = (message["content"] for message in chat(number)["messages"])
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        if style == "alpaca":
            prompt = f"### Instruction:\n{question}\n\n### Response:\n"
        text = f"{prompt}{answer}<|im_end|>" + ("\n" if style is None else "")
        offsets = tokenizer(text, return_offsets_mapping=True)
        ids = torch.tensor([offsets["input_ids"]])
        with torch.inference_mode():
            logs = model(input_ids=ids).logits[0].log_softmax(-1)
        for at, (_, end) in enumerate(offsets["offset_mapping"]):
            if len(prompt) < end <= len(prompt) + len(answer) + len("<|im_end|>"):
                total -= logs[at - 1, ids[0, at]]
                count += 1
    return float(total), count


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 100}, {"micro_batch": 1}])
def test_perplexity_is_that_of_a_loop_by_hand(base: Path, options: dict[str, Any], tmp_path: Path) -> None:
    report = evaluate(EvaluateSettings(base, data=chats(tmp_path / "a.jsonl", COUNT), **options))
    total, tokens = by_hand(base)
    assert report.tokens == tokens
    assert report.loss == pytest.approx(total / tokens, rel=1e-5)
    assert report.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert f"perplexity: {report.perplexity:.4f}" in report.describe()
    json.dumps(report.as_dict())


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "gpt2"])
def test_other_families_agree_with_a_loop_by_hand(family: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / family, family)
    report = evaluate(EvaluateSettings(folder, data=chats(tmp_path / "a.jsonl", COUNT)))
    total, tokens = by_hand(folder)
    assert report.loss == pytest.approx(total / tokens, rel=1e-5)


def test_a_style_is_that_of_the_training(base: Path, tmp_path: Path) -> None:
    records = [
        dict(zip(("instruction", "output"), (one["content"] for one in chat(number)["messages"]), strict=True))
        for number in range(COUNT)
    ]
    data = write_jsonl(tmp_path / "a.jsonl", records)
    folder = tmp_path / "trained"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "recipe.json").write_text('{"settings": {"prompt_style": "alpaca"}}')
    total, tokens = by_hand(base, style="alpaca")
    for model, options in ((base, {"prompt_style": "alpaca"}), (folder, {})):
        report = evaluate(EvaluateSettings(model, data=data, **options))
        assert (report.tokens, report.loss) == (tokens, pytest.approx(total / tokens, rel=1e-5))


def test_every_token_of_texts_counts_once(base: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text(sentence(number, 12))
    report = evaluate(EvaluateSettings(base, data=tmp_path / "texts", max_length=16))
    tokenizer = small_tokenizer()
    tokens = sum(len(tokenizer(sentence(number, 12))["input_ids"]) + 1 for number in range(5))
    assert tokens - 1 - tokens // 16 <= report.tokens <= tokens - 1


def test_held_out_data_of_the_run_are_the_default(base: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", base, "full")
    export_run(run, run / "model")
    report = evaluate(EvaluateSettings(run))
    direct = evaluate(EvaluateSettings(run / "model", data=run / "held.jsonl"))
    assert report.data == "held-out data of the run"
    assert (report.tokens, report.loss) == (direct.tokens, pytest.approx(direct.loss, rel=1e-6))
    before = evaluate(EvaluateSettings(base, data=run / "held.jsonl"))
    assert before.loss is not None
    assert report.loss is not None
    assert report.loss < before.loss - 0.1
    with pytest.raises(ConfigError, match="Expected data, or a run with held-out data"):
        evaluate(EvaluateSettings(base))


def test_a_limit_bounds_the_batches(base: Path, tmp_path: Path) -> None:
    report = evaluate(EvaluateSettings(base, data=chats(tmp_path / "a.jsonl", COUNT), limit=2, micro_batch=3))
    assert report.rows == 6


def test_problems_of_settings_and_of_data_are_named(base: Path, tmp_path: Path) -> None:
    wrong = EvaluateSettings(base, data=tmp_path, tasks=tmp_path / "no.yaml", train_on="no", limit=0, device="x")
    with pytest.raises(ConfigError) as error:
        evaluate(wrong)
    names = ["device", "tasks", "train_on", "limit"]
    assert [line.strip().partition(":")[0] for line in error.value.what.splitlines()[1:]] == names
    write_jsonl(tmp_path / "a.jsonl", [{"question": "a"}])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: Expected"):
        evaluate(EvaluateSettings(base, data=tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError, match="max_length: Expected at most the model's 128 positions, got 999"):
        evaluate(EvaluateSettings(base, data=chats(tmp_path / "b.jsonl"), max_length=999))


def write_task(folder: Path) -> Path:
    questions = [{"q": sentence(number, 4), "choices": ["fox", "jugs"], "answer": number % 2} for number in range(6)]
    data = write_jsonl(folder / "questions.jsonl", questions)
    task = {
        "task": "local_words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    path = folder / "words.yaml"
    path.write_text(yaml.safe_dump(task))
    return path


def choice(logs: Tensor, ids: list[int], start: int) -> float:
    return sum(float(logs[at - 1, ids[at]]) for at in range(start, len(ids)))


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval (loopwright[eval])")
def test_a_local_task_of_lm_eval_has_the_accuracy_by_hand(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task = write_task(tmp_path)
    report = evaluate(EvaluateSettings(base, tasks=task, device="cpu"))
    model, tokenizer = open_plain(base), small_tokenizer()
    right = 0
    for line in (tmp_path / "questions.jsonl").read_text().splitlines():
        record = json.loads(line)
        prompt = tokenizer(record["q"])["input_ids"]
        scores = []
        for answer in record["choices"]:
            ids = tokenizer(f"{record['q']} {answer}")["input_ids"]
            with torch.inference_mode():
                logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(choice(logs, ids, len(prompt)))
        right += scores.index(max(scores)) == record["answer"]
    assert report.tasks is not None
    assert report.tasks["local_words"]["acc"] == pytest.approx(right / 6)
    assert report.loss is None
    assert "local_words: acc" in report.describe()


def test_a_file_without_a_task_is_refused(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "a.yaml").write_text("name: a\nfunction: !function os.system\n")
    with pytest.raises(ConfigError, match="Expected a YAML file with the entry task"):
        evaluate(EvaluateSettings(base, tasks=tmp_path / "a.yaml"))
