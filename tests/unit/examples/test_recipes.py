"""examples/recipes: the commands of its README, each with its file and small settings, in a copy of the folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "recipes"
SMALL = ("epochs=null", "steps=2", "max_length=64", "micro_batch=2", "global_batch=4", "trainer.logger=false")


def run(folder: Path, *arguments: str) -> str:
    """Run Python in the folder and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def recipe(folder: Path, *arguments: str) -> str:
    return run(folder, "-m", "loopwright", "recipe", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples with data, a tokenizer and a base model."""
    copy = tmp_path_factory.mktemp("examples") / "recipes"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    run(copy, "make_data.py", "--files", "12", "--sums", "60")
    recipe(copy, "tokenizer", "--config", "tokenizer.yaml")
    recipe(copy, "pretrain", "--config", "pretrain.yaml", *SMALL)
    return copy


@pytest.mark.slow
def test_pretrained_folder_is_a_model_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "runs" / "pretrain" / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs" / "pretrain" / "model")
    assert model(**tokenizer("def f():", return_tensors="pt")).logits.shape[-1] == 2048


@pytest.mark.slow
@pytest.mark.parametrize("name", ["instruct", "chat", "lora", "qlora", "long_sequences", "many_gpus"])
def test_finetune(name: str, folder: Path) -> None:
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    recipe(folder, "finetune", "--config", f"{name}.yaml", *SMALL)
    made = {file.name for file in (folder / "runs" / name / "model").iterdir()}
    adapters = name in ("lora", "qlora")
    assert ("adapter_model.safetensors" if adapters else "model.safetensors") in made
    assert json.loads((folder / "runs" / name / "report.json").read_text())


@pytest.mark.slow
def test_plan_trains_nothing(folder: Path) -> None:
    recipe(folder, "plan", "--config", "lora.yaml", "out=runs/planned", *SMALL)
    assert not list(folder.glob("runs/planned/**/*.ckpt"))


@pytest.mark.slow
def test_what_comes_after_training(folder: Path) -> None:
    recipe(folder, "finetune", "--config", "lora.yaml", "out=runs/after", *SMALL)
    answer = ("generate", "model=runs/after", "prompt=What is 3 + 4?", "temperature=0", "max_new_tokens=4")
    first, again = (recipe(folder, *answer).rpartition(" tokens in ")[0] for _ in range(2))
    assert first == again  # the line after it says how long it took
    evaluated = recipe(folder, "evaluate", "model=runs/after", "data=runs/data/held_out.jsonl", "max_length=64")
    assert "perplexity" in evaluated
    recipe(folder, "export", "run=runs/after", "to=runs/merged", "merge=true")
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder / "runs" / "merged")


@pytest.mark.slow
def test_evaluate_a_local_task(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    assert "exact_match" in recipe(folder, "evaluate", "model=runs/pretrain", "tasks=sums.yaml")
