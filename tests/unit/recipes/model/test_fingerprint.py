"""Fingerprints of model folders: stable, plain, and different for another base."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loopwright.checkpoint import require_plain
from loopwright.errors import ConfigError
from loopwright.recipes.model.fingerprint import check_weight_files, fingerprint_of_folder, fingerprint_problems


def model_folder(path: Path, *, seed: int = 0, width: int = 4, config: object = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config or {"hidden_size": width}))
    draw = torch.Generator().manual_seed(seed)
    weights = {"a.weight": torch.randn(3, width, generator=draw), "b.weight": torch.randn(width, generator=draw)}
    save_file(weights, path / "model.safetensors")
    return path


def test_a_fingerprint_is_stable_and_plain(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a")
    stored = fingerprint_of_folder(folder)
    assert stored["shapes"] == {"a.weight": [3, 4], "b.weight": [4]}
    assert stored["files"] == {"model.safetensors": (folder / "model.safetensors").stat().st_size}
    require_plain(stored)
    assert json.loads(json.dumps(stored)) == stored
    (folder / "README.md").write_text("something else")
    assert fingerprint_of_folder(folder) == stored
    assert fingerprint_problems(stored, folder) == []


def test_files_of_an_index_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / first)
    save_file({"c.weight": torch.ones(2)}, folder / second)
    index = {"weight_map": {"a.weight": first, "b.weight": first, "c.weight": second}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(fingerprint_of_folder(folder)["shapes"]) == {"a.weight", "b.weight", "c.weight"}  # type: ignore[call-overload]
    (folder / second).unlink()
    with pytest.raises(ConfigError, match=f"got none named {second}"):
        fingerprint_of_folder(folder)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"seed": 1}, "Expected the weights of the base model, got other values of the same shapes"),
        ({"config": {"hidden_size": 4, "rope": 2}}, r"Expected the config\.json of the base model, got another one"),
        ({"width": 5}, r"Expected the shape \[3, 4\] of the tensor a\.weight, got \[3, 5\]"),
    ],
)
def test_another_base_is_named(tmp_path: Path, other: dict[str, object], problem: str) -> None:
    stored = fingerprint_of_folder(model_folder(tmp_path / "a"))
    found = fingerprint_problems(stored, model_folder(tmp_path / "b", **other))  # type: ignore[arg-type]
    assert any(re.search(problem, one) for one in found), found


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    stored = fingerprint_of_folder(model_folder(tmp_path / "a"))
    other = model_folder(tmp_path / "b")
    save_file({"a.weight": torch.ones(3, 4), "c.weight": torch.ones(4)}, other / "model.safetensors")
    found = fingerprint_problems(stored, other)
    assert f"Expected the tensor b.weight, got none in {other}." in found
    assert f"Expected no tensor c.weight, got one in {other}." in found


def test_a_folder_without_weights_and_a_damaged_header_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with config\.json, got"):
        fingerprint_of_folder(tmp_path / "none")
    folder = model_folder(tmp_path / "a")
    stored = fingerprint_of_folder(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="readable header"):
        fingerprint_of_folder(folder)
    (folder / "model.safetensors").unlink()
    assert "Expected weights" in fingerprint_problems(stored, folder)[0]


@pytest.mark.parametrize("is_small", [True, False])
def test_one_tensor_with_other_values_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_small: bool) -> None:
    if not is_small:
        monkeypatch.setattr("loopwright.recipes.model.fingerprint._SMALL", 0)
    weights = {f"{number}.weight": torch.zeros(20_000) for number in range(8)}
    folder = model_folder(tmp_path / "a")
    save_file(weights, folder / "model.safetensors")
    stored = fingerprint_of_folder(folder)
    weights["5.weight"][-1] = 1
    save_file(weights, folder / "model.safetensors")

    (problem,) = fingerprint_problems(stored, folder)
    assert "got other values of the same shapes (5.weight) in" in problem


def test_fingerprints_of_earlier_versions_are_compared(tmp_path: Path) -> None:
    stored = fingerprint_of_folder(model_folder(tmp_path / "a"))
    del stored["tensors"]
    assert fingerprint_problems(stored, tmp_path / "a") == []
    (problem,) = fingerprint_problems(stored, model_folder(tmp_path / "b", seed=1))
    assert "got other values of the same shapes in" in problem


def test_a_file_that_lacks_its_end_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a")
    check_weight_files(folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"got \d+: a part of it is missing"):
        check_weight_files(folder)
