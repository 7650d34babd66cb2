"""Devices for training, and their precisions."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from ..messages import counted
from .finding import Finding, Level, show_size

_SECTION = "devices"


def examine() -> Iterator[Finding]:
    """Yield findings about torch and the devices that it reaches."""
    import torch

    from ..accelerators import ACCELERATOR_REGISTRY

    yield Finding(_SECTION, "torch", f"{torch.__version__}, {_built_for()}")
    for name in ACCELERATOR_REGISTRY:
        kind = ACCELERATOR_REGISTRY.get(name)
        if kind.is_available():
            yield Finding(
                _SECTION, f'accelerator="{name}"', f"available, {counted(kind.auto_device_count(), 'device')}"
            )
        else:
            missing = kind.explain_missing(f"accelerator={name!r}")
            yield Finding(_SECTION, f'accelerator="{name}"', "not available" if missing is None else missing[0])
    yield from _cards()
    yield Finding(_SECTION, "precision on the CPU", ", ".join(_cpu_precisions()))


def _built_for() -> str:
    import torch

    if torch.version.cuda:
        return f"built for CUDA {torch.version.cuda}"
    if torch.version.hip:
        return f"built for ROCm {torch.version.hip}"
    return "built for CPUs" if not torch.backends.mps.is_built() else "built for CPUs and MPS"


def _cards() -> Iterator[Finding]:
    import torch

    seen = _cards_of_the_driver()
    count = torch.cuda.device_count()
    if seen and not count:
        if torch.version.cuda is None:
            value, advice = (
                "torch was built without CUDA",
                "install a build of torch for CUDA (pytorch.org, 'Get started')",
            )
        else:
            value = f"torch {torch.__version__} does not reach it"
            advice = (
                "check CUDA_VISIBLE_DEVICES, and whether the driver (nvidia-smi shows it) is new enough for this CUDA"
            )
        yield Finding(_SECTION, "GPU", f"the driver shows {', '.join(seen)}, but {value}", Level.PROBLEM, advice)
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        capability = f"compute capability {properties.major}.{properties.minor}"
        has_bfloat16 = properties.major >= 8 or torch.version.hip is not None
        value = f"{properties.name}, {show_size(properties.total_memory)}, {capability}"
        yield Finding(
            _SECTION,
            f"cuda:{number}",
            value if has_bfloat16 else f"{value}, no bfloat16",
            Level.OK if has_bfloat16 else Level.NOTE,
            "" if has_bfloat16 else "use precision='16-mixed' rather than 'bf16-mixed'",
        )


def _cards_of_the_driver() -> list[str]:
    """Return names of cards that nvidia-smi lists; empty where there is no driver."""
    return [
        line.strip()
        for line in run_nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
        if line.strip()
    ]


def run_nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi prints; "" where there is no driver, or it fails or does not answer within 20 s."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _cpu_precisions() -> list[str]:
    import torch

    found = ["float32", "float64", "bfloat16"]
    fast = torch.ops.mkldnn if hasattr(torch.ops, "mkldnn") else None
    for name, dtype in (("bfloat16", "bf16"), ("float16", "fp16")):
        is_fast = getattr(fast, f"_is_mkldnn_{dtype}_supported", None)
        if is_fast is None:
            continue
        text = f"{name} (in hardware)" if is_fast() else f"{name} (slow: this processor has no instructions for it)"
        found = [one for one in found if one != name] + [text]
    return found
