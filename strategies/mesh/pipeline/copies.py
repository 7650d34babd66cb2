"""`StageCopies`: comparison of what every stage has, such as a teacher beside the module that is split.

Gradients of copies are added over stages, so that optimizers keep them alike. A hook that updates one from the module
that is split (a mean teacher, a momentum encoder) finds other parameters there on each stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from ....errors import ModuleError
from ...distributed.collectives import gather_objects
from ...distributed.shards import is_sharded
from ..verify import mark_of, saved_buffers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .split import StageSplit

_PLAIN = (Tensor, nn.Parameter)

Marks = dict[str, int]
"""A checksum of each tensor, by its name in the user's module."""


class StageCopies:
    """Parameters and saved buffers that several ranks of a pipeline have.

    They are compared before the first window, when 1, 2, 4, 8, ... have ended, and in each checkpoint.

    Args:
        split: This rank's stages.
        group: The ranks of the pipeline.
    """

    def __init__(self, split: StageSplit, group: ProcessGroup) -> None:
        self._split, self._group = split, group
        self._count = 0
        self._alike: Marks = {}  # when they were last compared before a window

    def begin_window(self) -> None:
        """Compare, if it is time for it. On every rank: then it communicates."""
        if not self._count & (self._count - 1):
            everyone = gather_objects(self.marks(), self._group)
            self.check(everyone)
            self._alike = everyone[0]
        self._count += 1

    def marks(self) -> Marks:
        """Return the checksums of what this rank and others have."""
        split = self._split
        parameters = dict(split.module.named_parameters(remove_duplicate=False))
        found: dict[str, Tensor] = {
            name: one for name, one in saved_buffers(split.module).items() if len(split.owners.get(name, ())) > 1
        }
        for shared in split.shared:
            mine = [parameters[name] for name in shared.names if name in parameters]
            if mine:
                found[shared.names[0]] = mine[0]
        parts = {name: one.to_local() if is_sharded(one) else one for name, one in found.items()}
        # Quantized and other subclasses do not show their bytes.
        return {name: mark_of(one) for name, one in parts.items() if type(one) in _PLAIN and not one.is_meta}

    def check(self, everyone: list[Marks]) -> None:
        """Compare the checksums of all ranks. A buffer that only the last stage changes is left to it.

        Raises:
            ModuleError: On every rank: some have different values; names the tensors.
        """
        split = self._split
        late: list[str] = []
        unlike: list[str] = []
        for name in dict.fromkeys(name for marks in everyone for name in marks):
            found = {rank: marks[name] for rank, marks in enumerate(everyone) if name in marks}
            if len(set(found.values())) == 1:
                continue
            others = {mark for rank, mark in found.items() if rank != split.owners[name][0]}
            is_late = others == {self._alike.get(name)} and name not in split.parameter_names
            (late if is_late else unlike).append(name)
        if unlike:
            raise self._unlike(unlike)
        for name in late:
            split.leave_to_last(name)

    def _unlike(self, names: list[str]) -> ModuleError:
        split, ranks = self._split, dist.get_process_group_ranks(self._group)
        pairs = [pair for name in names[:1] if (pair := self._mismatched(name))]
        because = "".join(
            f" On rank {ranks[rank]}, {whole}.parameters() and {part}.parameters() in order pair {mine} with {theirs}: "
            f"{part} has this rank's stages only, and {whole} is on every rank."
            for whole, part, rank, mine, theirs in pairs
        )
        shown = f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        steps = "1 step" if self._count == 1 else f"{self._count} steps"
        source = pairs[0][1] if pairs else split.plan.child or "module"
        return ModuleError(
            f"Expected the same values on the pipeline's ranks {', '.join(map(str, ranks))} of what all of them have, "
            f"got different ones of {shown} after {steps}.{because}",
            fix="in hooks, on every rank, update it from values that all stages have: state = self.trainer.strategy."
            f"broadcast(self.trainer.full_state_dict(self.{source})) gives all weights of what is split; or keep a "
            "block's copy in the block, or train without pp.",
        )

    def _mismatched(self, name: str) -> tuple[str, str, int, str, str] | None:
        """Return a module on every rank that is like the one that is split, that one, and what a rank would pair."""
        split, path, part = self._split, name, self._split.plan.child
        parts = [one for one in split.parameter_names if one.startswith(f"{part}.")]
        while path := path.rpartition(".")[0]:
            whole = [one for one in split.parameter_names if one.startswith(f"{path}.")]
            if [one.removeprefix(path) for one in whole] != [one.removeprefix(part) for one in parts]:
                continue
            for rank in range(split.num_ranks):
                own = [one for one in parts if rank in split.owners[one]]
                for mine, theirs in zip(whole, own, strict=False):
                    if mine.removeprefix(path) != theirs.removeprefix(part):
                        return path, part, rank, mine, theirs
        return None
