"""Deals prompts to processes, calls functions on some of them, and exchanges objects."""

from importlib.util import find_spec

import numpy
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast, broadcast_object_list, gather_object, set_seed
from record import record

state = PartialState(cpu=True)
set_seed(0)
prompts = ["a dog", "a cat", "a bird", "a horse", "a fish"]
for padding in (False, True):
    with state.split_between_processes(prompts, apply_padding=padding) as mine:
        record("mine", padding, mine)
        results = [prompt.upper() for prompt in mine]
    record("gathered", gather_object(results))
with state.split_between_processes({"a": [1, 2, 3], "b": torch.arange(3)}) as part:
    record("part", part)
with state.split_between_processes(torch.arange(7.0)) as part:
    record("part", part)


@state.on_main_process
def main_only(value):
    record("main", value)
    return value


@state.on_last_process
def last_only():
    record("last", state.process_index)


@state.on_process(process_index=0)
def first_only():
    record("first")


@state.on_local_main_process
def local_main_only():
    record("local main")


record("returned", main_only(3))
last_only()
first_only()
local_main_only()
with state.main_process_first():
    record("inside", state.is_main_process)
state.wait_for_everyone()
accelerator = Accelerator(cpu=True)
record(
    "same", accelerator.state.num_processes == state.num_processes, accelerator.device.type, accelerator.use_distributed
)
record("ranks", accelerator.process_index, accelerator.local_process_index, accelerator.is_local_main_process)
objects = [accelerator.process_index, {"name": "x" * accelerator.process_index}]
record("broadcast", broadcast_object_list(objects, from_process=0), objects)
record("broadcast tensor", broadcast(torch.full((2,), float(accelerator.process_index + 1))))
record("gathered", accelerator.gather_for_metrics([accelerator.process_index, "text"], use_gather_object=True))
record("gathered", accelerator.gather({"x": [torch.full((1, 2), accelerator.process_index)]}))
with accelerator.split_between_processes([1, 2, 3]) as few:
    record("few", few)
for padded in (False, True) if find_spec("datasets") else ():
    from datasets import Dataset

    rows = Dataset.from_list([{"row": index} for index in range(3)])
    with accelerator.split_between_processes(rows, apply_padding=padded) as few:
        record("rows", len(few), [row["row"] for row in few])
with accelerator.split_between_processes({"prompts": ["a", "b", "c"], "style": "abc"}) as few:
    record("whole text", few)
with accelerator.split_between_processes(numpy.arange(3)) as few:
    record("whole array", few.tolist())
rank = float(accelerator.process_index)
record("largest", accelerator.reduce({"x": torch.tensor([rank, -rank, 2.0])}, reduction="max"))
accelerator.print("only once")
accelerator.end_training()
