"""Reading of `accelerate config` files for `loopwright launch --config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import Problems
from ...messages import counted

# A file with one of these is one of `accelerate config`.
_MARKS = (
    "compute_environment", "distributed_type", "mixed_precision", "num_machines", "num_processes", "machine_rank",
    "main_process_ip", "use_cpu",
)  # fmt: skip
_STRATEGIES = {
    "NO": None, "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "MULTI_XPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed",
    "XLA": "xla", "TPU": "xla",
}  # fmt: skip
_ACCELERATORS = {"MULTI_CPU": "cpu", "MULTI_GPU": "cuda", "XLA": "tpu", "TPU": "tpu"}
_PRECISIONS = {"no": None, "bf16": "bf16-mixed", "fp16": "16-mixed"}
_OFF: tuple[object, ...] = (None, False, "no", "NO", "", "main", {}, [])
# Key -> what to do instead, for keys that the file may leave out without a loss.
_LEFT_OUT = {
    "fsdp_config": "pass FSDPStrategy(...) in the program",
    "deepspeed_config": "pass DeepSpeedStrategy(...) in the program",
    "dynamo_config": "pass compile=True in the program",
    "downcast_bf16": "pass precision='bf16-true'",
    "main_training_function": "the program is run as a script",
    "parallelism_config": "pass strategy='mesh:dp=...,fsdp=...,tp=...,cp=...' in the program",
    "debug": "ranks are always watched",
    "enable_cpu_affinity": "set it with numactl or the scheduler",
}


@dataclass
class AccelerateConfig:
    """What a file of `accelerate config` means for `loopwright launch`.

    Attributes:
        options: Option name -> value.
        others: Keys that are not Accelerate's.
        left_out: A line for each setting that has no effect.
        problems: What cannot be done.
    """

    options: dict[str, str] = field(default_factory=dict)
    others: dict[object, object] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)


def is_accelerates(content: Mapping[object, object]) -> bool:
    """Return whether a file is one of `accelerate config`."""
    return any(name in content for name in _MARKS)


def translate(content: Mapping[object, object], path: str) -> AccelerateConfig:
    """Return the options of `loopwright launch` for a file of `accelerate config`."""
    found, keys = AccelerateConfig(), dict(content)
    where = keys.pop("compute_environment", None) or "LOCAL_MACHINE"
    if where != "LOCAL_MACHINE":
        starts = ", which starts a job" if where == "AMAZON_SAGEMAKER" else ""
        found.problems.add(
            f"Expected compute_environment: LOCAL_MACHINE in {path}, got {where}{starts}.",
            fix="start the job with the service's own tools, and `loopwright launch train.py` in it.",
        )
        return found  # the other keys are the job's
    keys.pop("same_network", None)  # the rendezvous does not need it
    if keys.pop("fp16", False):  # in files of early versions, as the next one
        keys.setdefault("mixed_precision", "fp16")
    if (compiler := keys.pop("dynamo_backend", None)) not in _OFF:
        keys["dynamo_config"] = {"dynamo_backend": compiler}
    kind = _set_kind(keys, path, found)
    _set_machines(keys, path, found, is_distributed=kind != "NO")
    name = str(keys.pop("mixed_precision", None) or "no").lower()
    if name not in _PRECISIONS:
        found.problems.add(
            f"Expected mixed_precision: no, fp16 or bf16 in {path}, got {name}.",
            fix="choose one of these; for fp8, leave it out and pass precision='float8' or 'transformer-engine' in the "
            "program.",
        )
    elif precision := _PRECISIONS[name]:
        found.options["precision"] = precision
    for key, value in list(keys.items()):
        known = str(key) in _LEFT_OUT or str(key).endswith("_config") or str(key).startswith(("tpu_", "command"))
        if known:
            del keys[key]
            if value not in _OFF:
                reason = _LEFT_OUT.get(str(key), "not supported")
                found.left_out.append(f"{key} ({reason})")
    found.others = keys
    return found


def _set_kind(keys: dict[object, object], path: str, found: AccelerateConfig) -> str:
    """Set strategy and accelerator, and return the distributed_type."""
    kind = str(keys.pop("distributed_type", None) or "NO").upper()  # NO without quotes is false in YAML
    if kind not in _STRATEGIES:
        found.problems.add(
            f"Expected distributed_type to be one of {', '.join(_STRATEGIES)} in {path}, got {kind}.",
            fix="for other ways to split a model, see docs/strategies.md.",
        )
    strategy = _STRATEGIES.get(kind)
    settings = keys.get("deepspeed_config")
    if strategy == "deepspeed" and isinstance(settings, Mapping):
        stage = str(settings.get("zero_stage", ""))
        if stage in ("1", "2", "3"):
            strategy = f"deepspeed_stage_{stage}"
        elif stage:
            found.problems.add(
                f"Expected zero_stage of 1, 2 or 3 in {path}, got {stage}.",
                fix="without a stage, use distributed_type: MULTI_GPU, which is ddp.",
            )
        rest = {key: value for key, value in settings.items() if key != "zero_stage" and value not in (*_OFF, "none")}
        keys["deepspeed_config"] = rest
    if strategy is not None:
        found.options["strategy"] = strategy
    is_cpu = str(keys.pop("use_cpu", None)).lower() in ("true", "yes", "1")
    accelerator = "cpu" if is_cpu else _ACCELERATORS.get(kind)
    if accelerator is not None:
        found.options["accelerator"] = accelerator
    return kind


def _set_machines(keys: dict[object, object], path: str, found: AccelerateConfig, *, is_distributed: bool) -> None:
    """Set processes, machines and their rendezvous; Accelerate counts the processes of all machines."""
    machines = _number(keys, "num_machines", path, found) or 1
    if str(keys.get("num_processes")) == "-1":  # Accelerate's default
        del keys["num_processes"]
    total = _number(keys, "num_processes", path, found)  # None: one for each GPU
    if total is None and not is_distributed:
        total = 1
    if total is not None and total % machines:
        found.problems.add(
            f"Expected num_processes to be a multiple of num_machines in {path}, got {total} and {machines}.",
            fix=f"start as many processes on each of the {counted(machines, 'machine')}.",
        )
    devices = str(keys.pop("gpu_ids", None) or "all").replace(" ", "").strip(",")
    if total is not None:
        local = total // machines or 1
        found.options["nproc-per-node"] = str(local)
        if devices == ",".join(map(str, range(local))):
            devices = "all"
    if devices != "all":
        found.options["devices"] = devices if "," in devices else f"{devices},"  # a number alone would be a count
    address, port, rank = (keys.pop(name, None) for name in ("main_process_ip", "main_process_port", "machine_rank"))
    backend = str(keys.pop("rdzv_backend", None) or "static")
    if machines == 1:
        return
    found.options["nnodes"] = str(machines)
    if backend == "static":
        given = {"node-rank": rank or 0, "main-address": address, "main-port": port}
        found.options |= {name: str(value) for name, value in given.items() if value is not None}
    else:
        found.options |= {"rdzv-backend": backend, "rdzv-id": "accelerate"}
        if address is not None:
            found.options["rdzv-endpoint"] = f"{address}:{port}" if port is not None else str(address)


def _number(keys: dict[object, object], name: str, path: str, found: AccelerateConfig) -> int | None:
    value = keys.pop(name, None)
    if value is None:
        return None
    if not str(value).isdecimal() or int(str(value)) < 1:
        found.problems.add(f"Expected {name} of 1 or more in {path}, got {value!r}.", fix="write a number.")
        return None
    return int(str(value))
