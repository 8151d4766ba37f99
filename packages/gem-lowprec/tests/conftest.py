from __future__ import annotations

import os
from importlib import import_module

import pytest
import torch

# Without a GPU, Triton kernels are tested in its interpreter, which must be chosen before a kernel is decorated.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import_module("gem_lowprec.kernels")


def pytest_configure(config: pytest.Config) -> None:
    # Every converted model on a CPU says once that it is emulated; the test of that message catches it itself.
    config.addinivalue_line("filterwarnings", "ignore:.* is emulated on:UserWarning")
