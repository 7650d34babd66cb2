"""Styles: a Linear layer by its output or its input features, an embedding, and layers that stay full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ....protocols import AnyOutput, Args, Call, Kwargs
from .layouts import convert, enter, gather, once
from .parameters import PARTIAL, replace_parameter, swap_in
from .style import Frame, Style, map_first

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

# Any in this file: arguments and results of the user's modules.


@dataclass(frozen=True, eq=False)
class Colwise(Style):
    """Each rank computes a part of the output features.

    Attributes:
        is_gathered: Whether the parts are gathered into the full output.
        keeps_dtensor: Whether the output is a DTensor of parts, for a loss that is computed in parts.
    """

    is_gathered: bool = False
    keeps_dtensor: bool = False

    @property
    def has_sharded_output(self) -> bool:  # type: ignore[override]
        """Whether another style has to take this rank's part."""
        return not (self.is_gathered or self.keeps_dtensor)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard weight and bias by output features."""
        dim = 1 if isinstance(module, nn.Embedding) else _dims(module)[0]
        return {name: Shard(dim if name == "weight" else 0) for name in module._parameters}

    def problem(self, module: nn.Module, tp: int) -> str | None:
        """Return what is wrong with class or number of output features."""
        if isinstance(module, nn.Embedding):
            return computed_weight(module) or _uneven("embedding_dim", module.embedding_dim, tp)
        return _not_linear(module) or _uneven("out_features", features(module)[0], tp)

    def enter(self, frame: Frame, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh) -> Call:
        """Take a full input."""
        if not isinstance(module, nn.Linear | nn.Embedding):  # Conv1D of transformers makes a shape of it
            frame.attributes.append(("nf", module.nf))
            module.nf = features(module)[0] // mesh.size()  # type: ignore[assignment]
        super().enter(frame, module, args, kwargs, mesh)
        if isinstance(module, nn.Embedding):
            return args, kwargs
        return map_first(args, kwargs, lambda x: convert(x, mesh, Replicate(), Replicate(), gradient=Partial()))

    def leave(self, frame: Frame, module: nn.Module, output: AnyOutput, mesh: DeviceMesh) -> AnyOutput:
        """Return this rank's part, a DTensor of it, or all of them."""
        if self.keeps_dtensor:
            return DTensor.from_local(once(output), mesh, [Shard(output.ndim - 1)], run_check=False)
        return gather(output, mesh, -1) if self.is_gathered else output


@dataclass(frozen=True, eq=False)
class Rowwise(Style):
    """Each rank computes with a part of the input features; the results are summed.

    Attributes:
        splits_input: Whether the input is full, and this rank takes its part.
        scatters: Whether each rank gets a part of the sum along dimension 1 (the sequence), and not all of it.
    """

    splits_input: bool = False
    scatters: bool = False

    @property
    def takes_sharded_input(self) -> bool:  # type: ignore[override]
        """Whether the input is this rank's part."""
        return not self.splits_input

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard the weight by input features; each rank has the bias."""
        return {name: Shard(_dims(module)[1]) if name == "weight" else Replicate() for name in module._parameters}

    def problem(self, module: nn.Module, tp: int) -> str | None:
        """Return what is wrong with class or number of input features."""
        return _not_linear(module) or _uneven("in_features", features(module)[1], tp)

    def enter(self, frame: Frame, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh) -> Call:
        """Take this rank's part of the input, and leave out the bias: it is added to the sum."""
        frame.swapped += swap_in([(module, "weight")], mesh)
        bias = module._parameters.get("bias")
        if bias is not None:
            # Conv1D of transformers adds one without looking.
            absent = None if isinstance(module, nn.Linear) else torch.zeros_like(_local(bias)).detach()
            replace_parameter(module, "bias", absent)
            frame.swapped.append((module, "bias", bias, absent))
        have = Replicate() if self.splits_input else None
        return map_first(args, kwargs, lambda x: convert(x, mesh, have or Shard(x.ndim - 1), Shard(x.ndim - 1)))

    def leave(self, frame: Frame, module: nn.Module, output: AnyOutput, mesh: DeviceMesh) -> AnyOutput:
        """Return the sum over ranks, with the bias."""
        total = convert(output, mesh, Partial(), Shard(1) if self.scatters else Replicate())
        bias = module._parameters.get("bias")
        if bias is None:
            # Not as the view that conversions return: what the model adds in place (`x += y`) would be refused.
            return torch.ops.aten._unsafe_view(total, total.shape)
        local = _local(bias)
        return total + (enter(local, mesh) if self.scatters else local).to(total.dtype)


@dataclass(frozen=True, eq=False)
class Embedding(Style):
    """Each rank has the vectors of a part of the indices; those that another rank has are added."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard the weight by indices."""
        return {name: Shard(0) if name == "weight" else Replicate() for name in module._parameters}

    def problem(self, module: nn.Module, tp: int) -> str | None:
        """Return what is wrong with class, options or number of indices."""
        if not isinstance(module, nn.Embedding):
            return f"is a {type(module).__name__}, and the style is for nn.Embedding"
        odd = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
        if odd:
            return f"has {', '.join(odd)}, which need all vectors"
        return computed_weight(module) or _uneven("num_embeddings", module.num_embeddings, tp)

    def enter(self, frame: Frame, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh) -> Call:
        """Look up this rank's indices; others as its first, which is then masked."""
        super().enter(frame, module, args, kwargs, mesh)
        size = features(module)[0] // mesh.size()
        first = mesh.get_local_rank() * size
        padding: Any = module.padding_idx
        if padding is not None:  # counted from the beginning of this rank's vectors, if it is one of them
            frame.attributes.append(("padding_idx", padding))
            local: Any = padding - first if first <= padding < first + size else None
            module.padding_idx = local

        def own(indices: Tensor) -> Tensor:
            shifted = indices - first
            frame.mask = (shifted < 0) | (shifted >= size)
            return shifted.masked_fill(frame.mask, 0)

        return map_first(args, kwargs, own)

    def leave(self, frame: Frame, module: nn.Module, output: AnyOutput, mesh: DeviceMesh) -> AnyOutput:
        """Return the vectors of all indices."""
        assert frame.mask is not None
        return convert(output.masked_fill(frame.mask.unsqueeze(-1), 0), mesh, Partial(), Replicate())


@dataclass(frozen=True, eq=False)
class Replicated(Style):
    """Each rank has the full weight.

    Attributes:
        is_partial: Whether ranks use it with different parts of the activations (a norm of this rank's heads, or of
            this rank's part of the sequence), so that gradients are summed over ranks.
    """

    is_partial: bool = False

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Mark the parameters, and register the hooks."""
        if self.is_partial:
            for one in module.modules():
                one.__dict__[PARTIAL] = frozenset(one._parameters)
        super().install(module, mesh)


@dataclass(frozen=True, eq=False)
class PackedColwise(Style):
    """Each rank computes a part of each of several outputs that one weight computes at once, such as q, k and v.

    Each rank holds the full weight, so that checkpoints have it as the user wrote it; fully_shard shards it over the
    ranks of its axis. Activations and computation are split.

    Attributes:
        parts: Number of output features of each part, in the order in which they lie in the weight; or the number of
            equal parts. None: three of a layer that is named as queries, keys and values, such as `qkv`, two of any
            other; see `heads.packed_parts`.
        copies: How many ranks compute the same share of each part: keys and values with fewer heads than ranks. Empty:
            each rank has another share.
    """

    parts: int | Sequence[int] | None = None
    copies: tuple[int, ...] = ()

    has_sharded_output = True

    def sizes(self, module: nn.Module) -> list[int]:
        """Return the number of output features of each part."""
        parts = 2 if self.parts is None else self.parts
        return [features(module)[0] // parts] * parts if isinstance(parts, int) else list(parts)

    def problem(self, module: nn.Module, tp: int) -> str | None:
        """Return what is wrong with class or number of output features."""
        if not is_linear(module):
            return _not_linear(module)
        total, sizes = features(module)[0], self.sizes(module)
        if self.parts is not None and sum(sizes) != total:
            return f"has out_features={total}, and the parts {sizes} add up to {sum(sizes)}"
        shares = zip(sizes, self.copies or (1,) * len(sizes), strict=True)
        return next((found for size, one in shares if (found := _uneven("a part of", size, tp // one))), None)

    def enter(self, frame: Frame, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh) -> Call:
        """Take a full input, and this rank's rows of each part."""
        dim, sizes, rank = _dims(module)[0], self.sizes(module), mesh.get_local_rank()
        copies = self.copies or (1,) * len(sizes)
        if not isinstance(module, nn.Linear):  # Conv1D of transformers makes a shape of it
            local_features = sum(size * one // mesh.size() for size, one in zip(sizes, copies, strict=True))
            frame.attributes.append(("nf", module.nf))
            module.nf = local_features  # type: ignore[assignment]
        swapped = swap_in([(module, name) for name in module._parameters], mesh)
        for owner, name, parameter, local in swapped:
            assert local is not None
            along = dim if name == "weight" else 0
            # This rank's part of the gradient: those of all ranks are added.
            parts = zip(enter(local, mesh).split(sizes, along), copies, strict=True)
            joined = torch.cat([part.chunk(mesh.size() // one, along)[rank // one] for part, one in parts], along)
            replace_parameter(owner, name, joined)
            frame.swapped.append((owner, name, parameter, joined))
        return map_first(args, kwargs, lambda x: convert(x, mesh, Replicate(), Replicate(), gradient=Partial()))


def is_linear(module: nn.Module) -> bool:
    """Return whether this is a Linear layer with a weight, or one of transformers with a transposed weight."""
    is_layer = isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
    return is_layer and "weight" in module._parameters


def features(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of output and input features of a Linear layer; of an embedding, of indices and features."""
    weight: Any = module._parameters["weight"]
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return weight.shape[1], weight.shape[0]


def _dims(module: nn.Module) -> tuple[int, int]:
    """Return the dimensions of a weight along which its output and input features lie."""
    return (0, 1) if isinstance(module, nn.Linear) else (1, 0)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _not_linear(module: nn.Module) -> str | None:
    return computed_weight(module) or (
        None if is_linear(module) else f"is a {type(module).__name__}, and the style is for Linear layers"
    )


def computed_weight(module: nn.Module) -> str | None:
    """Return that a weight is computed from others (weight_norm, spectral_norm, pruning), as the end of a sentence."""
    if "weight" in module._parameters or not isinstance(module, nn.Linear | nn.Embedding):
        return None
    names = [name for name, _ in module.named_parameters() if "weight" in name]
    listed = ", ".join(names) or "nothing"
    return f"computes its weight from {listed} (weight_norm, spectral_norm): it cannot be split"


def _uneven(what: str, size: int, tp: int) -> str | None:
    return f"has {what}={size}, which tp={tp} does not divide" if size % tp else None
