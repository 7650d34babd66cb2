"""The inputs of a model split along the sequence, positions for the parts, and its outputs gathered."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import ModuleError
from ....protocols import AnyOutput, Args, Call, Kwargs, StepOutput, Tree
from ...distributed.shards import is_sharded
from ...tree import leaves, map_leaves
from .parts import SequenceParts

# Any in this file: arguments of the user's model.

_POSITIONS = "position_ids"


def local_length(length: int, size: int, what: str) -> int:
    """Return the length of a part.

    Raises:
        ModuleError: The parts would differ in length, or have one position only.
    """
    if length % size or length < 2 * size:
        raise ModuleError(
            f"Expected sequences whose length is a multiple of cp={size} with at least two positions for each part, "
            f"got length {length} in {what}.",
            fix=f"pad the sequences to a multiple of {size} where the loss leaves padding out (ignore_index), or cut "
            "them.",
        )
    return length // size


@dataclass
class CallArguments:
    """The arguments of one call of a model, by the names of its `forward`.

    Attributes:
        names: Names of positional parameters, in order.
        values: The arguments that were given, by name; those of *args under their numbers.
        extra: How many positional arguments have no name.
        takes: Every name that can be passed by keyword.
    """

    names: list[str]
    values: Kwargs
    extra: int
    takes: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, args: Args, kwargs: Mapping[str, Any]) -> CallArguments:
        """Return the arguments of a call `model(*args, **kwargs)`."""
        parameters = inspect.signature(model.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [one.name for one in parameters if one.kind in positional]
        by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        takes = frozenset(one.name for one in parameters if one.kind in by_keyword)
        extra = max(0, len(args) - len(names))
        given = [*names[: len(args)], *(f"args[{index}]" for index in range(extra))]
        return cls(given, {**dict(zip(given, args, strict=True)), **kwargs}, extra, takes)

    def call(self) -> Call:
        """Return positional and keyword arguments."""
        positional = tuple(self.values[name] for name in self.names)
        return positional, {name: value for name, value in self.values.items() if name not in self.names}

    def tensors(self) -> dict[str, Tensor]:
        """Return the arguments that are tensors."""
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}

    def dimensions(self, wanted: Mapping[str, int] | None, model: str) -> dict[str, int]:
        """Return which arguments are split, along which dimensions.

        Raises:
            ModuleError: A wanted argument is missing, or has no such dimension; names all.
        """
        tensors = self.tensors()
        if wanted is None:
            first = next((name for name, one in tensors.items() if one.ndim > 1), None)
            wanted = {"a tensor with two dimensions": 1} if first is None else {first: 1}
        wrong = [name for name, dim in wanted.items() if name not in tensors or tensors[name].ndim <= dim]
        if wrong:
            shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in tensors.items()) or "no tensor"
            raise ModuleError(
                f"Expected {', '.join(wrong)} among the arguments of {model} as Context(inputs=...) splits them, got "
                f"{shapes}.",
                fix='pass inputs= with names of arguments that are tensors, such as Context(inputs={"input_ids": 1}).',
            )
        return dict(wanted)

    def split(self, dimensions: Mapping[str, int], parts: SequenceParts, model: str) -> int:
        """Replace arguments by this rank's parts, add positions where the model takes them; return a part's length.

        Raises:
            ModuleError: A length does not divide, or another argument has the length of the sequence.
        """
        tensors = self.tensors()
        lengths = {name: tensors[name].shape[dim] for name, dim in dimensions.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ModuleError(
                f"Expected inputs of {model} with one length of sequences, got {listed}.",
                fix="pass the dimension of the sequence for each of them in Context(inputs=...).",
            )
        name, length = next(iter(lengths.items()))
        own = local_length(length, parts.size, f"{name} of {model}")
        whole = self._whole(tensors, dimensions, length)
        if whole:
            raise _left_whole(whole, tensors, model, parts.size)
        if _POSITIONS in tensors and _POSITIONS not in dimensions:
            dimensions = {**dimensions, _POSITIONS: tensors[_POSITIONS].ndim - 1}
        for key, dim in dimensions.items():
            self.values[key] = parts.split(tensors[key], dim)
        self.add_positions(own, parts, tensors[name].device)
        return own

    def _whole(self, tensors: dict[str, Tensor], dimensions: Mapping[str, int], length: int) -> list[str]:
        others = [name for name in tensors if name not in dimensions and name != _POSITIONS]
        return [name for name in others if length in tensors[name].shape[1:] or tensors[name].shape == (length,)]

    def add_positions(self, length: int, parts: SequenceParts, device: torch.device) -> None:
        """Pass the positions of this rank's part, shape (1, length), where the model takes `position_ids`."""
        if _POSITIONS in self.takes and self.values.get(_POSITIONS) is None:
            start = parts.rank * length
            self.values[_POSITIONS] = torch.arange(start, start + length, device=device)[None]
        if "use_cache" in self.takes and "use_cache" not in self.values:
            self.values["use_cache"] = False  # keys of one part would be no cache of the sequence


def gather_outputs(output: StepOutput, dim: int, parts: SequenceParts) -> AnyOutput:
    """Return a model's output, checked already, with its tensors gathered along the sequence."""

    def gather(leaf: Tree) -> Tree:
        if not is_sharded(leaf):
            return parts.gather(leaf, dim) if isinstance(leaf, Tensor) else leaf
        # Logits in parts of the vocabulary.
        whole = parts.gather(leaf.to_local(), dim)
        return type(leaf).from_local(whole, leaf.device_mesh, leaf.placements, run_check=False)

    return map_leaves(output, gather)


def check_outputs(output: StepOutput, dim: int, length: int, parts: SequenceParts, model: str) -> None:
    """Compare the shapes of a model's outputs with the part of the sequence that it ran on.

    Raises:
        ModuleError: A tensor has no dimension of the part's length where the inputs have it; names it.
    """
    wrong = [
        f"output{path} of shape {tuple(leaf.shape)}"
        for path, leaf in leaves(output)
        if isinstance(leaf, Tensor) and not (leaf.ndim > dim and leaf.shape[dim] == length)
    ]
    if wrong:
        raise ModuleError(
            f"Expected outputs of {model} with {length} positions along dimension {dim} with cp={parts.size}, got "
            f"{', '.join(wrong)}, which each rank computed from its part of the sequence.",
            fix="let the model return a value for each position and reduce it in the step; or pass Context(batch=...).",
        )


def _left_whole(names: list[str], tensors: dict[str, Tensor], model: str, size: int) -> ModuleError:
    if "attention_mask" in names:
        shape = tuple(tensors["attention_mask"].shape)
        return ModuleError(
            f"Expected {model} to be called without a mask with cp={size}, got cp={size} with an attention mask of "
            f"shape {shape}.",
            fix="leave attention_mask out and fill sequences to one length, or train with cp=1.",
        )
    shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in names)
    return ModuleError(
        f"Expected all inputs of {model} with the length of the sequence to be split with cp={size}, got {shapes} "
        "unsplit.",
        fix="add them to Context(inputs=...) with the dimension of the sequence; compute the loss outside of the "
        "model, where the outputs are full sequences.",
    )
