"""Without a GPU, Triton kernels are tested in its interpreter, which must be chosen before a kernel is decorated."""

import os
from importlib import import_module

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Decorate every kernel now: a test that sets the variable for a while would leave interpreted kernels on a GPU.
for _operator in ("block_attention", "gdpa", "jagged_attention", "norms", "projections", "rotary", "sequences"):
    import_module(f"gem_kernels.{_operator}.triton")


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
