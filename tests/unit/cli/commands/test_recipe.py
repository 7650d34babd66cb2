"""`loopwright recipe`: settings from files, environment and command line; help; errors; the report as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from loopwright.cli import run
from loopwright.cli.commands.recipe import RECIPES, recipe
from loopwright.cli.litgpt_options import LITGPT_OPTIONS

# Any in this file: YAML and JSON.

GIVEN = ["model=base", "data=chats.jsonl", "out=runs/a"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a recipe that ends with code 2 and return what it says."""
    with pytest.raises(SystemExit) as caught:
        recipe(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return the configuration that a recipe prints."""
    assert recipe([*arguments, "--print-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_recipes_are_listed_and_an_unknown_one_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in RECIPES), text
    assert run(["recipe", "finetun"]) == 2
    assert "got 'finetun' (did you mean 'finetune'?)" in capsys.readouterr().err


def test_a_file_is_a_path_and_not_read_as_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "recipe.yaml").write_text("model: config.json")
    found = printed(capsys, "pretrain", "--config", "recipe.yaml", *GIVEN[1:])
    assert found["model"] == "config.json"
    assert printed(capsys, "pretrain", "model=config.json", *GIVEN[1:])["model"] == "config.json"


def test_help_describes_settings_of_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "": [
            "global_batch: int | str (default 'auto')",
            "max_length: int",
            "Tokens in a row.",
            "model: Path (required)",
        ],
        "lora": ["lora.r: int (default 16)", "Rank of the adapters."],
        "lora.r": ["lora.r: int (default 16)"],
        "trainer.max_time": ["trainer.max_time:"],
        "learning_rate": ["Largest learning rate"],
    }
    for topic, parts in expected.items():
        assert recipe(["finetune", "--help", *([topic] if topic else [])]) == 0
        text = capsys.readouterr().out
        assert all(part in text for part in parts), text


def test_every_setting_of_a_training_has_a_description() -> None:
    from loopwright.settings.parameters import parameters_of

    for name in ("finetune", "pretrain"):
        known = parameters_of(RECIPES[name].settings_class()).named
        assert [one.name for one in known.values() if not one.text] == []


def test_sources_are_merged_and_nested_settings_are_dotted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "base.yaml"
    file.write_text(
        "tokenizer: tok\nmax_length: 100\nlora: {r: 4, alpha: 8}\n"
        "finetune: {micro_batch: 3}\npretrain: {micro_batch: 5}\n"
    )
    monkeypatch.setenv("LW__LORA__R", "8")
    arguments = [*GIVEN, "--config", str(file), "max_length=64", "trainer.max_time=00:01:00:00", "optimizer=SGD"]
    found = printed(capsys, "finetune", *arguments, "optimizer.momentum=0.9", "tokens=1e6")

    assert found["tokenizer"] == "tok"
    assert found["max_length"] == 64
    assert (found["lora"]["r"], found["lora"]["alpha"], found["lora"]["dropout"]) == (8, 8.0, 0.0)
    assert found["micro_batch"] == 3
    assert found["trainer"] == {"max_time": "00:01:00:00"}
    assert found["optimizer"] == {"class_path": "SGD", "init_args": {"momentum": 0.9}}
    assert found["tokens"] == 1_000_000
    assert found["warmup"] == 0.03


def test_a_printed_configuration_is_one_that_gives_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = printed(capsys, "finetune", *GIVEN, "lora.targets=[q_proj, v_proj]", "strategy=mesh:fsdp=2,tp=2")
    file = tmp_path / "printed.yaml"
    file.write_text(yaml.safe_dump(first))
    assert printed(capsys, "finetune", "--config", str(file)) == first


def test_options_of_litgpt_are_refused_with_their_names_here(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(
        capsys, "finetune", "model=base", "out=x", "--data", "JSON", "--data.json_path", "sums.json", "--lora_r", "8",
        "--num_nodes", "2", "--train.micro_batch_size", "2", "--train.max_seq_length", "512",
    )  # fmt: skip
    for part in (
        "data.json_path (command line): unknown setting; LitGPT's data.json_path is data here",
        "lora_r (command line): unknown setting; LitGPT's lora_r is lora.r here",
        "num_nodes (command line): unknown setting; LitGPT's num_nodes is trainer.num_nodes here",
        "LitGPT's train.micro_batch_size is micro_batch here",
        "LitGPT's train.max_seq_length is max_length here",
        "got 5 problems",
    ):
        assert part in text, text


def test_a_setting_below_the_path_of_the_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "finetune", "model=base", "data=x", "out=x", "model.dtype=bfloat16")
    assert "model.dtype (command line): unknown setting" in text, text


def test_settings_below_the_path_of_data_are_refused_unless_an_earlier_file_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, "finetune", "model=base", "data=x", "data.weight=2", "out=x")
    assert "data.weight (command line): unknown setting; data is a path here: write data.path=x" in text, text

    file = tmp_path / "earlier.yaml"
    file.write_text("data:\n  path: a.jsonl\n  weight: 2\n")
    text = refused(capsys, "finetune", "--config", str(file), "model=base", "data=x", "out=x")
    assert "data.weight" not in text, text
    text = refused(capsys, "finetune", "--config", str(file), "model=base", "data=x", "data.weight=3", "out=x")
    assert "data.weight (command line): unknown setting" in text, text


def test_settings_that_litgpts_options_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    names = {setting.partition(",")[0].partition(" ")[0] for setting in LITGPT_OPTIONS.values()}
    for name in sorted(names):
        recipe = "pretrain" if name in ("tokens", "tokenizer") else "finetune"
        assert run(["recipe", recipe, "--help", name]) == 0, capsys.readouterr().err


def test_all_problems_of_settings_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(
        capsys, "finetune", "model=base", "data=x", "max_lenght=3", "micro_batch=two", "lora.rank=3", "epochs=0",
        "resume=maybe", "warmup=1.5",
    )  # fmt: skip
    for part in (
        "max_lenght (command line): unknown setting (did you mean 'max_length'?)",
        "micro_batch (command line): expected int, got two",
        "lora.rank (command line): LoraSettings has no parameter 'rank'",
        "out: required",
    ):
        assert part in text
    text = refused(capsys, "finetune", *GIVEN, "max_lenght=3", "epochs=0", "resume=maybe", "warmup=1.5")
    for part in (
        "max_lenght",
        "epochs: Expected at least 1, got 0",
        "resume: Expected one of",
        "warmup: Expected a whole number of steps, or a share",
    ):
        assert part in text


def test_text_that_looks_like_something_else_stays_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "finetune", "model=7b", "data=2024", "out=1e3", "prompt_style=Q: {prompt} A:")
    assert (found["data"], found["out"], found["prompt_style"]) == ("2024", "1e3", "Q: {prompt} A:")


def test_a_report_is_text_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text " * 20)
    given = [f"data={tmp_path / 'texts'}", "vocab_size=270"]
    assert recipe(["tokenizer", *given, f"out={tmp_path / 'one'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == 1
    assert recipe(["tokenizer", *given, f"out={tmp_path / 'two'}"]) == 0
    assert capsys.readouterr().out.startswith(f"tokenizer: {tmp_path / 'two'}, ")
    assert "out: Expected a folder that does not exist" in refused(
        capsys, "tokenizer", *given, f"out={tmp_path / 'one'}"
    )


def test_importing_loopwright_and_help_import_no_transformers() -> None:
    code = (
        "import sys, loopwright, loopwright.cli; from loopwright.recipes.settings import FinetuneSettings\n"
        "loopwright.cli.run(['recipe', 'finetune', '--help', 'lora'])\n"
        "libraries = {'transformers', 'peft', 'bitsandbytes', 'lm_eval'}\n"
        "print(sorted(libraries & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_recipes_without_transformers_say_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from loopwright.cli import run\n"
        "for words in ('finetune model=m data=d out=o', 'chat model=m', 'generate model=m prompt=p',\n"
        "              'evaluate model=m data=d', 'export run=r to=t'):\n"
        "    try:\n"
        "        run(['recipe', *words.split()])\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 2, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("needs the package 'transformers'") == 5
    assert done.stderr.count("pip install 'loopwright[recipes]'") == 5
