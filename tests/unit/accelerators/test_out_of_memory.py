"""Which errors mean that memory ran out."""

from __future__ import annotations

import pytest
import torch

from loopwright.accelerators.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes"), True),
        (RuntimeError("[Errno 12] Cannot allocate memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
