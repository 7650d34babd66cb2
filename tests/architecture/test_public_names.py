"""What the package offers: names that exist, are listed, and say what they are for."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import sys
import tomllib
from pathlib import Path

import pytest

import loopwright as lw

from .sources import ROOT, package_files, package_folders, place, tree_of


def module_name(folder: str) -> str:
    return ".".join(["loopwright", *folder.split("/")]) if folder else "loopwright"


FOLDERS = [str(folder.relative_to(ROOT)) for folder in package_folders() if folder != ROOT]


def test_the_listed_packages_are_those_that_are_there() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = settings["tool"]["setuptools"]["packages"]
    without_code = ["loopwright.compat.site", "loopwright.recipes.model.configs"]  # setuptools wants them listed, too
    assert sorted(listed) == sorted(["loopwright", *map(module_name, FOLDERS), *without_code])
    assert (ROOT / "py.typed").exists()


def test_no_file_is_named_like_a_module_of_the_standard_library() -> None:
    names = {part.stem for part in package_files() if not part.stem.startswith("__")}
    names |= {folder.name for folder in package_folders() if folder != ROOT}
    names |= {file.stem for file in ROOT.glob("*.py") if not file.stem.startswith("__")}
    assert not names & set(sys.stdlib_module_names)


def test_the_public_names_are_sorted_and_each_resolves() -> None:
    names = [name for name in lw.__all__ if name != "__version__"]
    assert names == sorted(set(names))
    for name in lw.__all__:
        assert getattr(lw, name) is not None
    assert set(lw.__all__) <= set(dir(lw))


def lazy_names(init: Path) -> dict[str, str] | None:
    """Return the mapping that an `__init__.py` gives to `attach`; None if it attaches nothing."""
    tree = tree_of(init)
    mappings = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and "attach(" in ast.unparse(node.value):
            mapping = node.value.args[1]
            names: dict[str, str] = ast.literal_eval(mappings.get(ast.unparse(mapping), mapping))
            return names
    return None


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_names_imported_on_first_use_are_those_that_editors_see(folder: str) -> None:
    init = ROOT / folder / "__init__.py"
    names = lazy_names(init)
    imported = {
        alias.name: node.module
        for block in tree_of(init).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    assert imported == (names or {})


def test_a_folder_names_the_nearest_public_name() -> None:
    with pytest.raises(AttributeError, match="did you mean 'SLURMEnvironment'"):
        lw.fabric.cluster.SLURMEnviroment  # noqa: B018


def test_an_unknown_name_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match="Trainer"):
        lw.Trianer  # noqa: B018


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_lists_its_public_names(folder: str) -> None:
    module = importlib.import_module(module_name(folder))
    names = list(module.__all__)
    assert len(names) == len(set(names))
    for name in names:
        getattr(module, name)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(f"{module.__name__}.")
    }
    assert public - set(names) <= {"TYPE_CHECKING"}, "imported, and not in __all__"


def test_every_file_that_lists_names_defines_them() -> None:
    """Packages list their names, and files those that they pass on from others; an underscore says what is private."""
    wrong, count = [], 0
    for file in package_files():
        if file.name == "__init__.py":
            continue
        module = importlib.import_module(module_name(str(file.relative_to(ROOT).with_suffix(""))))
        names = vars(module).get("__all__", ())
        wrong += [f"{module.__name__}: {name}" for name in names if not hasattr(module, name)]
        count += bool(names)
    assert count > 20
    assert not wrong, "\n".join(wrong)


def listed_names() -> list[tuple[str, str]]:
    lines = (ROOT / "tests" / "architecture" / "public_names.txt").read_text().splitlines()
    rows = [line.partition(": ") for line in lines if not line.startswith("#")]
    return [(package, name) for package, _, names in rows for name in names.split()]


def test_names_that_were_public_still_are() -> None:
    listed = listed_names()
    assert len(listed) > 300
    gone = [f"{package}.{name}" for package, name in listed if not hasattr(importlib.import_module(package), name)]
    assert not gone, gone


def test_public_classes_are_pickled_by_a_path_that_can_be_imported() -> None:
    classes = {getattr(lw, name) for name in lw.__all__ if inspect.isclass(getattr(lw, name))}
    assert len(classes) > 80
    assert [kind for kind in classes if pickle.loads(pickle.dumps(kind)) is not kind] == []


@pytest.mark.parametrize(
    "old",
    # Where these classes lived before their folders: pickles and programs that named the file still find them.
    ["strategies.ddp:DDPStrategy", "strategies.fsdp:FSDPStrategy", "strategies.deepspeed:DeepSpeedStrategy",
     "strategies.xla:XLAStrategy", "callbacks.model_checkpoint:ModelCheckpoint", "trainer.timeline:Timeline"],
)  # fmt: skip
def test_classes_of_engines_are_found_under_their_old_paths(old: str) -> None:
    module, _, name = old.partition(":")
    assert inspect.isclass(getattr(importlib.import_module(f"loopwright.{module}"), name))


def documented_objects() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for owner in (lw, *(importlib.import_module(module_name(folder)) for folder in FOLDERS)):
        for name in owner.__all__:
            value = getattr(owner, name)
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            found.append((f"{owner.__name__}.{name}", value))
            if inspect.isclass(value):
                own = {k: v for k, v in vars(value).items() if not k.startswith("_")}
                found += [
                    (f"{owner.__name__}.{name}.{key}", getattr(value, key))
                    for key, v in own.items()
                    if inspect.isroutine(v) or isinstance(v, property | classmethod | staticmethod)
                ]
    return found


def test_every_public_name_has_a_docstring() -> None:
    # A dataclass writes a docstring of its own: its signature.
    wrong = [
        name
        for name, value in documented_objects()
        if not inspect.getdoc(value) or (inspect.getdoc(value) or "").startswith(f"{name.rsplit('.', 1)[-1]}(")
    ]
    assert not wrong, wrong


def test_every_file_says_what_lives_there() -> None:
    assert not [place(file, tree_of(file)) for file in package_files() if not ast.get_docstring(tree_of(file))]


def test_no_file_names_its_callers() -> None:
    # Such a sentence becomes false when a caller moves, and nothing notices.
    names_a_caller = re.compile(r"\b(called|made|used|asked|imported) (only )?by [a-z_/]+\.py", re.IGNORECASE)
    wrong = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in package_files()
        for match in names_a_caller.finditer(" ".join(file.read_text().split()))
    ]
    assert not wrong, "\n".join(wrong)


# Lightning has these names, and its programs import them: a class of compat/ extends or replaces the core's.
LIGHTNINGS = {
    "Accelerator", "AdvancedProfiler", "BasePredictionWriter", "CSVLogger", "CombinedLoader", "CometLogger",
    "DeepSpeedPrecision", "EMAWeightAveraging", "Fabric", "FabricModule", "LayerSummary", "LearningRateMonitor",
    "Logger", "MLFlowLogger", "ModelCheckpoint", "ModelPruning", "ModelSummary", "Profiler", "ProgressBar",
    "PyTorchProfiler", "RichProgressBar", "SimpleProfiler", "SpikeDetection", "StochasticWeightAveraging",
    "TQDMProgressBar", "TensorBoardLogger", "ThroughputMonitor", "Timer", "Trainer", "TrainerState", "WandbLogger",
    "WeightAveraging",
}  # fmt: skip


def test_a_class_name_means_one_class() -> None:
    homes: dict[str, list[str]] = {}
    for file in package_files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    twice = {name: files for name, files in homes.items() if len(set(files)) > 1}
    assert {name: files for name, files in twice.items() if name not in LIGHTNINGS} == {}
    # Lightning, too, has a callback and a class for loops on Fabric of that name.
    in_core = {name for name, files in twice.items() if sum(not file.startswith("compat/") for file in files) > 1}
    assert in_core <= {"ThroughputMonitor"}
