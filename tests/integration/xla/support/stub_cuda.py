"""Stand-ins for the CUDA libraries that torch's wheel links to, so that it can be imported on a machine without them.

torch_xla works with one build of torch only, whose wheel wants gigabytes of CUDA libraries even where no GPU is. Each
stand-in has the name, the version and the symbols that torch asks for, and every function in it returns 1 (an error).
This is no configuration of any vendor, and for tests only. It needs gcc and readelf.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["build_stand_ins"]


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        file: Its file name, which is also what torch asks for.
        folder: Its folder below site-packages/nvidia, where torch looks.
        version: Version of its symbols, where they have one.
        prefix: How names of its symbols begin, where they have none.
    """

    file: str
    folder: str
    version: str | None = None
    prefix: str | None = None

    def has(self, name: str, version: str) -> bool:
        if self.version is not None:
            return version == self.version
        return not version and re.match(f"{self.prefix}[A-Z_]", name) is not None


def _versioned(file: str, folder: str) -> Library:
    return Library(file, folder, version=file)


LIBRARIES = (
    _versioned("libcudnn.so.9", "cudnn"),
    _versioned("libcublas.so.12", "cublas"),
    _versioned("libcublasLt.so.12", "cublas"),
    _versioned("libcusparse.so.12", "cusparse"),
    _versioned("libcufft.so.11", "cufft"),
    _versioned("libcupti.so.12", "cuda_cupti"),
    Library("libnvshmem_host.so.3", "nvshmem", version="NVSHMEM"),
    Library("libcurand.so.10", "curand", prefix="curand"),
    Library("libnccl.so.2", "nccl", prefix="nccl"),
    Library("libcusparseLt.so.0", "cusparselt", prefix="cusparseLt"),
    Library("libcufile.so.0", "cufile", prefix="cuFile"),
)


def build_stand_ins(site_packages: Path) -> None:
    """Build what is missing below `site_packages`/nvidia; libraries that are there stay."""
    wanted = set(_undefined(site_packages / "torch" / "lib"))
    for library in LIBRARIES:
        target = site_packages / "nvidia" / library.folder / "lib" / library.file
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _compile(library, sorted(name for name, version in wanted if library.has(name, version)), target)


def _undefined(folder: Path) -> Iterator[tuple[str, str]]:
    """Give name and version of every symbol that torch's libraries expect from others."""
    for file in sorted(folder.glob("lib*.so")):
        listed = subprocess.run(
            ["readelf", "--wide", "--dyn-syms", file], check=True, capture_output=True, text=True
        ).stdout
        for line in listed.splitlines():
            fields = line.split()
            if len(fields) >= 8 and fields[6] == "UND":
                name, _, version = fields[7].partition("@")
                yield name, version.lstrip("@")


def _compile(library: Library, symbols: list[str], target: Path) -> None:
    source = "\n".join(f"int {name}(void) {{ return 1; }}" for name in symbols or ["nothing_is_asked_for"])
    options = ["-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library.file}", "-o", str(target)]
    script = target.with_suffix(".map")
    if library.version is not None:
        script.write_text(f"{library.version} {{ global: *; }};\n")
        options.append(f"-Wl,--version-script={script}")
    subprocess.run(["gcc", *options, "-x", "c", "-"], input=source, text=True, check=True)
    script.unlink(missing_ok=True)
