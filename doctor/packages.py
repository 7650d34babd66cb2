"""Versions of packages, and whether they import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import Requirement

from .. import __version__
from .finding import Finding, Level
from .imports import find_broken

_SECTION = "packages"
_NONE: Mapping[str, str] = {}
_OLDEST_TORCH, _NEWEST_TORCH = (2, 9), (2, 13)


@dataclass(frozen=True)
class Optional:
    """An optional package.

    Attributes:
        package: Name in the package index.
        gives: What it provides.
        install: Command that installs it.
        has_engine: Whether it is imported in a separate process.
        is_slow: Whether its import takes seconds; then its version is looked up, and it is not imported.
        module: Name of its module; empty if that is the package's.
    """

    package: str
    gives: str
    install: str
    has_engine: bool = False
    is_slow: bool = False
    module: str = ""


_OPTIONAL = (
    Optional("deepspeed", 'strategy="deepspeed"', "pip install 'loopwright[deepspeed]'", has_engine=True),
    Optional("torch_xla", 'strategy="xla"', "pip install torch==2.9.0 'loopwright[xla]'", has_engine=True),
    Optional("wandb", "WandbLogger", "pip install 'loopwright[wandb]'"),
    Optional("mlflow", "MLFlowLogger", "pip install 'loopwright[mlflow]'"),
    Optional("comet-ml", "CometLogger", "pip install 'loopwright[comet]'", is_slow=True),
    Optional("trackio", "TrackioLogger", "pip install 'loopwright[trackio]'", is_slow=True),
    Optional("prometheus_client", "PrometheusLogger", "pip install 'loopwright[prometheus]'"),
    Optional("torchmetrics", "metrics in self.log", "pip install 'loopwright[metrics]'"),
    Optional("torchdata", "StatefulDataLoader", "pip install torchdata"),
    Optional("plotly", "loopwright report", "pip install 'loopwright[report]'"),
    Optional("matplotlib", "plots of the learning rate finder", "pip install 'loopwright[plots]'"),
    Optional("psutil", "statistics of the CPU", "pip install 'loopwright[stats]'"),
    Optional("nvidia-ml-py", "statistics of NVIDIA's cards", "pip install 'loopwright[gpu]'", module="pynvml"),
    Optional("transformers", "loopwright recipe", "pip install 'loopwright[recipes]'", is_slow=True),
    Optional("lm-eval", "tasks of lm-eval", "pip install 'loopwright[eval]'", module="lm_eval"),
    Optional("bitsandbytes", "QLoRA, 8-bit optimizers", "pip install 'loopwright[qlora]'", is_slow=True),
    Optional("torchao", 'precision="float8", "mxfp8"', "pip install 'loopwright[float8]'", is_slow=True),
    Optional("jsonargparse", "LightningCLI", "pip install 'loopwright[lightning]'"),
    Optional("onnx", "Module.to_onnx", "pip install 'loopwright[onnx]'"),
    Optional("optuna", "OptunaPruning", "pip install 'loopwright[optuna]'"),
    Optional("ray", "Ray Train and Tune", "pip install 'loopwright[ray]'", is_slow=True),
    Optional("torchft", "fault tolerance by torchft", "pip install 'loopwright[torchft]'", is_slow=True),
    Optional("mpi4py", "MPIEnvironment", "pip install 'loopwright[mpi]'"),
)


def examine(timeout_s: float) -> Iterator[Finding]:
    """Yield findings about packages; the import of an engine is ended after `timeout_s` seconds."""
    yield Finding(_SECTION, "loopwright", __version__)
    yield judge_torch(metadata.version("torch"))
    needed = [text for text in metadata.requires("loopwright") or [] if _is_needed(text)]
    # In one process, for speed: many of them import torch.
    modules = [_module(Requirement(text).name) for text in needed]
    modules += [
        one.module or _module(one.package)
        for one in _OPTIONAL
        if not one.has_engine and not one.is_slow and _version(one.package) is not None
    ]
    broken = find_broken(modules, timeout_s)
    for requirement in needed:
        yield judge_needed(requirement, broken)
    for optional in _OPTIONAL:
        yield judge_optional(optional, timeout_s, broken)


def _is_needed(requirement: str) -> bool:
    return "extra ==" not in requirement and not requirement.startswith("torch>")


def _module(package: str) -> str:
    return package.replace("-", "_")


def judge_torch(version: str) -> Finding:
    """Return whether Loopwright is tested with this version of torch."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    oldest, newest = (".".join(map(str, one)) for one in (_OLDEST_TORCH, _NEWEST_TORCH))
    if numbers < _OLDEST_TORCH:
        return Finding(_SECTION, "torch", f"{version} is too old", Level.PROBLEM, f"pip install 'torch>={oldest}'")
    if numbers > _NEWEST_TORCH:
        value = f"{version}, newer than what is tested ({oldest} to {newest})"
        return Finding(_SECTION, "torch", value, Level.NOTE, "look for a newer Loopwright if something fails")
    return Finding(_SECTION, "torch", version)


def judge_needed(requirement: str, broken: Mapping[str, str] = _NONE) -> Finding:
    """Return whether a required package is installed in a version that fits, and is not among the broken ones."""
    needed = Requirement(requirement)
    found = _version(needed.name)
    if found is None:
        return Finding(_SECTION, needed.name, "missing", Level.PROBLEM, f"pip install '{requirement}'")
    if not needed.specifier.contains(found.split(" (")[0], prereleases=True):
        return Finding(
            _SECTION,
            needed.name,
            f"{found}, but {needed.specifier} is needed",
            Level.PROBLEM,
            f"pip install '{requirement}'",
        )
    return _judge_import(needed.name, found, broken, f"pip install --force-reinstall '{requirement}'")


def judge_optional(optional: Optional, timeout_s: float, broken: Mapping[str, str] = _NONE) -> Finding:
    """Return whether an optional package is installed and not broken; an engine has to import within `timeout_s`."""
    found = _version(optional.package)
    if found is None:
        return Finding(_SECTION, optional.package, f"missing ({optional.gives})", Level.NOTE, optional.install)
    if optional.has_engine:
        broken = find_broken([optional.package], timeout_s)
        found = found if broken else f"{found}, imports"
    advice = f"{optional.install}, or pip uninstall {optional.package}"
    return _judge_import(optional.package, found, broken, advice, optional.module)


def _judge_import(package: str, found: str, broken: Mapping[str, str], advice: str, module: str = "") -> Finding:
    why = broken.get(module or _module(package))
    if why is None:
        return Finding(_SECTION, package, found)
    return Finding(_SECTION, package, f"{found}, cannot be imported: {why}", Level.PROBLEM, advice)


def _version(package: str) -> str | None:
    """Return the version of an installed package; None where nothing can be imported under its name.

    Another distribution may bring the module: mlflow-skinny has mlflow. Its version counts then.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    try:
        is_there = find_spec(_module(package)) is not None
    except (ImportError, ValueError):  # a module without a spec in sys.modules
        is_there = False
    if not is_there:
        return None
    owners = metadata.packages_distributions().get(_module(package), [])
    return f"{metadata.version(owners[0])} ({owners[0]})" if owners else "of unknown version"
