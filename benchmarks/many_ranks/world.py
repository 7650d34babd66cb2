"""A world of many ranks in one process: this rank is real, its peers answer as copies of it, and all is counted.

Real are the Trainer, the strategy, torch's wrappers (DDP, FSDP2, torch.distributed.checkpoint) and the registration of
ranks. Simulated are the two things that connect them: the store, and the process group.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loopwright.strategies.distributed.store_tree import FAN, children

__all__ = ["LOCAL", "Counts", "Partner", "SimulatedStore", "World", "middle_of"]

# Any in this file: what is sent, and torch's unannotated options.

LOCAL = 8
"""Ranks of a machine."""

_SMALL = 64  # elements of a tensor that two ranks may have different
_PATIENCE_S = 120.0

# Keys that each rank writes for itself: a peer's holds what this rank wrote at its own.
_OF_RANK = re.compile(r"(?P<start>(.*/)?(rank|peer/|beat/|done/|stall/\d+/))(?P<rank>\d+)$")
_OF_TREE = re.compile(r"(?P<name>.*(arrivals|ack|meeting/\d+|changes/\d+))/(?P<level>\d+)/(?P<number>\d+)$")


class Counts(Counter[str]):
    """What this rank has used, by kind; the time of the simulation itself is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self._inside = 0.0

    @contextmanager
    def simulating(self) -> Iterator[bool]:
        """Leave the block out of the CPU time; yields whether this is the counted thread."""
        is_counted = threading.get_ident() == self.thread
        began = time.thread_time()
        try:
            yield is_counted
        finally:
            if is_counted:
                self._inside += time.thread_time() - began

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Note nothing in the block."""
        thread, self.thread = self.thread, -1
        try:
            yield
        finally:
            self.thread = thread

    def cpu_s(self) -> float:
        """Return the CPU seconds of the counted thread so far."""
        return time.thread_time() - self._inside

    def note(self, **counts: float) -> None:
        """Add to the counts, on the counted thread."""
        if threading.get_ident() == self.thread:
            for name, count in counts.items():
                self[name] += count  # type: ignore[assignment]  # bytes may be halves of a ring's


def _as_rank(obj: Any, rank: int, own: int) -> Any:
    """Return what a peer would have at this place: the object of this rank, with the peer's part of each tensor."""
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    if isinstance(obj, SavePlan):
        return dataclasses.replace(obj, items=[_item_of(item, rank) for item in obj.items])
    if isinstance(obj, list) and obj and isinstance(obj[0], WriteResult):
        return [_written_by(one, rank, own) for one in obj]
    return obj


def _item_of(item: Any, rank: int) -> Any:
    """Shift a chunk along its first dimension, which is the one that is sharded."""
    chunk = item.tensor_data.chunk
    offsets = torch.Size([rank * chunk.sizes[0], *chunk.offsets[1:]])
    return dataclasses.replace(
        item,
        index=dataclasses.replace(item.index, offset=offsets),
        tensor_data=dataclasses.replace(item.tensor_data, chunk=dataclasses.replace(chunk, offsets=offsets)),
    )


def _written_by(result: Any, rank: int, own: int) -> Any:
    written = result.storage_data

    def renamed(name: str) -> str:
        return name.replace(f"-{own:05d}-of-", f"-{rank:05d}-of-")

    chunks = {
        path: dataclasses.replace(chunk, file=renamed(chunk.file), offsets=(rank * chunk.sizes[0], *chunk.offsets[1:]))
        for path, chunk in written.chunks.items()
    }
    files = {renamed(name): entry for name, entry in written.files.items() if name.startswith("shard-")}
    return dataclasses.replace(result, storage_data=type(written)(files=files, chunks=chunks))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class SimulatedStore(dist.Store):  # type: ignore[misc, name-defined]  # missing in torch's types
    """A store of one process, whose peers have written what this rank wrote; messages and bytes are counted."""

    def __init__(self, size: int, rank: int, counts: Counts) -> None:
        super().__init__()
        self._size = size
        self._rank = rank
        self._counts = counts
        self._values: dict[str, bytes] = {}
        self.missing: set[int] = set()
        """Peers that have not written anything since they were put here."""

    def clone(self) -> SimulatedStore:
        return self

    def set(self, key: str, value: bytes) -> None:
        with self._counts.simulating():
            self._counts.note(messages=1, store_bytes=len(key) + len(value), keys_set=1)
            self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        with self._counts.simulating():
            value = self._value(key)
            self._counts.note(messages=1, store_bytes=len(key) + len(value), keys_read=1)
            return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._counts.simulating():
            values = [self._value(key) for key in keys]
            size = sum(map(len, keys)) + sum(map(len, values))
            self._counts.note(messages=1, store_bytes=size, keys_read=len(keys))
            return values

    def check(self, keys: list[str]) -> bool:
        with self._counts.simulating():
            self._counts.note(messages=1, store_bytes=sum(map(len, keys)), keys_read=len(keys))
            return all(self._has(key) for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._counts.simulating():
            self._counts.note(messages=1, store_bytes=len(key) + 8, keys_set=bool(amount), keys_read=not amount)
            own = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(own).encode()
            return own * self._writers(key)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._counts.simulating():
            self._counts.note(messages=1, store_bytes=len(key) + len(desired), keys_set=1)
            if self._values.get(key, b"") == _bytes(expected):
                self._values[key] = _bytes(desired)
            return self._values[key]

    def wait(self, keys: list[str], *timeout: Any) -> None:
        if not self.check(keys):
            raise RuntimeError(f"the simulated peers never write {keys}")

    def deleteKey(self, key: str) -> bool:  # torch's name
        return self._values.pop(key, None) is not None

    def _writers(self, key: str) -> int:
        """Return how many ranks add to a counter as this one does."""
        if "notifications" in key or "changes/of" in key or "/reporter" in key:
            return 1
        if "machine/" in key:
            return min(LOCAL, self._size)
        node = _OF_TREE.fullmatch(key.removesuffix("/count"))
        if node is not None:
            return len(children(int(node["level"]), int(node["number"]), self._size))
        return self._size - len(self.missing)

    def _own_key(self, key: str) -> tuple[str, int] | None:
        node = _OF_TREE.fullmatch(key)
        if node is not None:  # of a StoreTree
            level = int(node["level"])
            return f"{node['name']}/{level}/{self._rank // FAN**level}", self._rank
        found = _OF_RANK.fullmatch(key)
        if found is None or int(found["rank"]) >= self._size or int(found["rank"]) in self.missing:
            return None
        return f"{found['start']}{self._rank}", int(found["rank"])

    def _find(self, key: str) -> tuple[str, int] | None:
        """Return the key of this rank with the same meaning, and whose it is; None if it is not written."""
        if key in self._values:
            return key, self._rank
        own = self._own_key(key)
        return own if own is not None and own[0] in self._values else None

    def _has(self, key: str) -> bool:
        return self._find(key) is not None

    def _value(self, key: str) -> bytes:
        found = self._find(key)
        if found is None:
            raise RuntimeError(f"the simulated peers never write {key}")
        return self._values[found[0]] if found[1] == self._rank else self._of_peer(self._values[found[0]], found[1])

    def _of_peer(self, value: bytes, rank: int) -> bytes:
        try:
            found = json.loads(value)
        except ValueError:
            return value
        if isinstance(found, dict) and "rank" in found:
            found = {**found, "rank": rank}
            if "machine" in found:
                found |= {"machine": f"machine-{rank // LOCAL}", "host": f"host-{rank // LOCAL}"}
            return json.dumps(found).encode()
        return value


class Partner:
    """The other of two real ranks, in another process: the first rank and a middle one run side by side.

    What ranks may have different (small tensors, objects) is exchanged between these two. All ranks but the first are
    taken to have what the middle one has.
    """

    def __init__(self, connection: Connection, *, is_first: bool) -> None:
        self._connection = connection
        self.is_first = is_first

    def send(self, obj: Any) -> None:
        self._connection.send(obj)

    def receive(self) -> Any:
        if not self._connection.poll(_PATIENCE_S):
            raise RuntimeError("the two real ranks do not make the same calls")
        return self._connection.recv()

    def exchange(self, obj: Any) -> tuple[Any, Any]:
        """Return what the first and the middle rank have."""
        self.send(obj)
        other = self.receive()
        return (obj, other) if self.is_first else (other, obj)


class SimulatedGroup(dist.ProcessGroup):
    """A process group whose other ranks answer at once: sums are multiples, and small tensors those of two ranks."""

    def __init__(self, rank: int, size: int, counts: Counts, partner: Partner) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's types have one of two
        self._numbers = rank, size
        self._counts = counts
        self._partner = partner
        self._name = ""

    def getBackendName(self) -> str:  # torch's name
        return "simulated"

    def getGroupName(self) -> str:  # torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # torch's name
        self._name = name

    def getGroupDesc(self) -> str:  # torch's name
        return "simulated"

    def setGroupDesc(self, text: str) -> None:  # torch's name
        pass

    def _done(self, kind: str, tensors: list[torch.Tensor], factor: float = 1.0) -> Any:
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._counts.note(collectives=1, collective_bytes=factor * size_bytes, **{f"of {kind}": 1})
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]

    def _of_two(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first rank's tensor, and that of all others."""
        own = tensor.detach().clone()
        if own.numel() > _SMALL:
            return own, own
        first, others = self._partner.exchange(own.numpy())
        return torch.from_numpy(first), torch.from_numpy(others)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:  # type: ignore[override]
        with self._counts.simulating():
            operation = getattr(options, "reduceOp", dist.ReduceOp.SUM)
            for tensor in tensors:
                first, others = self._of_two(tensor)
                if operation == dist.ReduceOp.SUM:
                    tensor.copy_(first + others * (self._numbers[1] - 1))
                elif operation == dist.ReduceOp.MAX:
                    tensor.copy_(torch.maximum(first, others))
                elif operation == dist.ReduceOp.MIN:
                    tensor.copy_(torch.minimum(first, others))
                else:
                    raise NotImplementedError(str(operation))
            return self._done("all_reduce", tensors, 2.0)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self.allreduce(tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:  # type: ignore[override]
        return self._done("broadcast", tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:  # type: ignore[override]
        with self._counts.simulating():
            for parts, own in zip(outputs, inputs, strict=True):
                first, others = self._of_two(own)
                for number, part in enumerate(parts):
                    part.copy_(others if number else first)
            return self._done("all_gather", [part for parts in outputs for part in parts])

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, options: Any = None) -> Any:
        with self._counts.simulating():
            output.view(self._numbers[1], -1).copy_(own.clone().reshape(1, -1))
            return self._done("all_gather", [output])

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, options: Any = None) -> Any:
        return self._allgather_base(output, own, options)

    def _reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, options: Any = None) -> Any:
        with self._counts.simulating():
            rank, size = self._numbers
            output.copy_(full.reshape(size, -1)[rank].clone().view_as(output))
            if getattr(options, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
                output.mul_(size)
            return self._done("reduce_scatter", [full])

    def reduce_scatter_single(self, output: torch.Tensor, full: torch.Tensor, options: Any = None) -> Any:
        return self._reduce_scatter_base(output, full, options)

    def barrier(self, options: Any = None) -> Any:
        return self._done("barrier", [])


class World:
    """Stands in for the other ranks: `with World(...) as world: ...` in a process that has no group yet.

    Args:
        size: Number of ranks.
        rank: This rank.
        partner: The other real rank.
        folder: Where files are counted.

    Attributes:
        counts: What this rank has used.
        store: The store that the ranks share.
    """

    def __init__(self, *, size: int, rank: int, partner: Partner, folder: str) -> None:
        self.size = size
        self.rank = rank
        self.counts = Counts()
        self.store = SimulatedStore(size, rank, self.counts)
        self._partner = partner
        self._folder = folder
        self._shards = ""

    def __enter__(self) -> World:
        from loopwright.strategies.distributed import collectives, rendezvous

        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.rank % LOCAL),
            "LOCAL_WORLD_SIZE": str(min(LOCAL, self.size)),
            "GROUP_RANK": str(self.rank // LOCAL),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
        replaced: list[tuple[Any, str, Any]] = [
            (rendezvous, "open_store", lambda cluster, timeout=None: self.store),
            (collectives, "broadcast", self._broadcast),
            (dist, "all_gather_object", self._all_gather_object),
            (dist, "gather_object", self._gather_object),
            (dist, "scatter_object_list", self._scatter_object_list),
            (dist, "broadcast_object_list", self._broadcast_object_list),
        ]
        for owner, name, simulated in replaced:
            setattr(owner, name, simulated)
        dist.Backend.register_backend("simulated", self._group, extended_api=True, devices=["cpu"])
        sys.addaudithook(self._note_file)
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the process as it is: it ends with its world."""

    def _group(self, options: Any, backend_options: Any) -> SimulatedGroup:
        group = SimulatedGroup(options.group_rank, options.group_size, self.counts, self._partner)
        group.setGroupName(options.group_id)
        return group

    # Objects: what arrives is unpickled, as it would be; what the peers do is left out.

    def _note_objects(self, kind: str, texts: list[bytes]) -> None:
        self.counts.note(
            collectives=1, collective_bytes=sum(map(len, texts)), objects=len(texts), **{f"of {kind} of objects": 1}
        )

    def _of_all(self, text: bytes, number: int) -> list[bytes]:
        """Return the pickled objects of all ranks."""
        with self.counts.simulating():
            first, others = self._partner.exchange(text)
            middle = self.rank or middle_of(self.size)
            obj = pickle.loads(others)
            return [first, *(pickle.dumps(_as_rank(obj, rank, middle)) for rank in range(1, number))]

    def _all_gather_object(self, boxes: list[Any] = [], obj: Any = None, group: Any = None, **names: Any) -> None:  # noqa: B006
        boxes = names.get("object_list", boxes)
        texts = self._of_all(pickle.dumps(obj), len(boxes))
        self._note_objects("all_gather", texts)
        boxes[:] = [pickle.loads(text) for text in texts]

    def _gather_object(self, obj: Any, object_gather_list: Any = None, dst: int = 0, group: Any = None) -> None:
        text = pickle.dumps(obj)
        texts = self._of_all(text, self.size)
        self._note_objects("gather", texts if object_gather_list is not None else [text])
        if object_gather_list is not None:
            object_gather_list[:] = [pickle.loads(one) for one in texts]
            self._make_shards(object_gather_list)

    def _make_shards(self, gathered: list[Any]) -> None:
        """Make the files that the peers report to have written, where torch's checkpoint gathers them."""
        from torch.distributed.checkpoint.storage import WriteResult

        with self.counts.simulating(), self.counts.uncounted():
            for results in gathered:
                if isinstance(results, list) and results and isinstance(results[0], WriteResult):
                    for name, entry in results[0].storage_data.files.items():
                        with open(Path(self._shards, name), "ab") as file:
                            file.truncate(entry.size)

    def _scatter_object_list(
        self, scatter_object_output_list: Any, scatter_object_input_list: Any = None, src: int = 0, group: Any = None
    ) -> None:
        if scatter_object_input_list is None:
            texts = [self._partner.receive()]
        else:
            texts = [pickle.dumps(answer) for answer in scatter_object_input_list]
            self._partner.send(texts[middle_of(self.size)])
        self._note_objects("scatter", texts)
        scatter_object_output_list[0] = pickle.loads(texts[0])
        order = getattr(scatter_object_output_list[0], "storage_data", None)
        if order is not None:
            self._shards = order.folder

    def _broadcast_object_list(self, object_list: list[Any], *others: Any, **named: Any) -> None:
        object_list[:] = self._broadcast(object_list, src=0, device=None)

    def _broadcast(self, obj: Any, *, src: int, device: Any) -> Any:
        if self.rank:
            text = self._partner.receive()
        else:
            text = pickle.dumps(obj)
            self._partner.send(text)
        self._note_objects("broadcast", [text])
        return pickle.loads(text) if self.rank else obj

    def _note_file(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not arguments or not str(arguments[0]).startswith(self._folder):
            return
        if event == "open":
            mode = arguments[1]
            is_written = isinstance(mode, str) and any(letter in mode for letter in "wax+")
            self.counts.note(files_written=is_written, files_read=not is_written)
        elif event in ("os.listdir", "os.scandir"):
            self.counts.note(listings=1)
        elif event in ("os.rename", "os.remove", "os.mkdir"):
            self.counts.note(files_written=1)


def middle_of(size: int) -> int:
    """Return a rank that is not the first of its machine."""
    return size // 2 + 1
