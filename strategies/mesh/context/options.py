"""`Context`: the tensors that are split along the sequence, and how attention gets the keys of the other parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....errors import Problems, nearest

METHODS = ("gather", "ulysses")


@dataclass(frozen=True)
class Context:
    """How `MeshStrategy` splits sequences over its axis `cp`.

    By default, the model's inputs are split when the step calls the model, and its outputs are gathered, so that the
    step receives full sequences and any loss is correct. With `batch=`, the batch is split: the step receives one part
    of each sequence, and returns `lw.Loss`, whose sums and weights are added over the parts.

    Args:
        inputs: The model's inputs to split, as names of arguments of its `forward`, with the dimension of the sequence:
            {"input_ids": 1}. None is its first tensor, along dimension 1.
        batch: The parts of the batch to split, as keys of a dict or positions in a tuple, with the dimension of the
            sequence: {"input_ids": 1, "labels": 1} or {0: 1, 1: 1}. None does not split the batch.
        method: "gather": every rank gathers all keys and values. "ulysses": for attention, ranks exchange parts of the
            sequence for heads; the number of heads must be a multiple of `cp`.
        module: Name of the submodule that is the model. None is the only submodule with parameters; with several, the
            module itself.

    Raises:
        ConfigError: An argument is invalid; every problem is named.
    """

    inputs: Mapping[str, int] | None = None
    batch: Mapping[str | int, int] | None = None
    method: str = "gather"
    module: str | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        _check_dimensions("inputs", self.inputs, (str,), '{"input_ids": 1}', problems)
        _check_dimensions("batch", self.batch, (str, int), '{"input_ids": 1, "labels": 1}', problems)
        if self.method not in METHODS:
            near = nearest(str(self.method), METHODS)
            what = f"Expected Context(method='gather' or 'ulysses'), got {self.method!r}{near}."
            problems.add(what, fix="pass one of the two.")
        if not (self.module is None or (isinstance(self.module, str) and self.module)):
            what = f"Expected Context(module=...) to be the name of a submodule, got {self.module!r}."
            problems.add(what, fix="pass a name or None.")
        if self.inputs is not None and self.batch is not None:
            problems.add(
                "Expected one of Context(inputs=...) and Context(batch=...), got both.",
                fix="pass inputs= to split what the model is called with, or batch= to split the batch before the "
                "step.",
            )
        problems.refuse()


def _check_dimensions(name: str, given: object, kinds: tuple[type, ...], example: str, problems: Problems) -> None:
    if given is None:
        return
    remedy = f"pass {name}={example}, or None."
    if not isinstance(given, Mapping):
        problems.add(f"Expected Context({name}=...) to be a dict of dimensions, got {given!r}.", fix=remedy)
        return
    if not given:
        problems.add(f"Expected at least one entry in Context({name}=...), got an empty dict.", fix=remedy)
    wrong = [
        f"{key!r}: {dim!r}"
        for key, dim in given.items()
        if not (isinstance(key, kinds) and type(key) is not bool and type(dim) is int and dim >= 0)
    ]
    if wrong:
        keys = "names" if kinds == (str,) else "names or positions"
        listed = ", ".join(wrong)
        problems.add(f"Expected {keys} with dimensions from 0 in Context({name}=...), got {listed}.", fix=remedy)
