"""What the first call of an operator builds on Hopper, and that other lengths build nothing, without a GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from gem_kernels.hopper import first_call
from gem_kernels.hopper.first_call import Launch


class Kernel:
    """Notes what is asked of it; building takes both kernels at once, or fails."""

    def __init__(self, name, log, together=None):
        self.name, self.log, self.together = name, log, together

    def warmup(self, *arguments, grid, **constants):
        if self.together is not None:
            self.together.wait(timeout=10)
        self.log.append(("build", self.name, arguments, threading.get_ident()))
        return SimpleNamespace(run=print)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.log.append(("run", self.name, arguments))


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(first_call, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
    monkeypatch.setattr(first_call, "_built", set())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def launch(kernel, *arguments):
    return Launch(kernel=kernel, grid=(1,), arguments=arguments, constants={})


def test_kernels_are_built_at_once_and_run_in_order():
    log = []
    together = threading.Barrier(2)
    slow, fast = Kernel("slow", log, together), Kernel("fast", log, together)
    for _ in range(2):
        first_call.run([launch(fast, 1), launch(slow, 2)], "key", torch.device("cpu"))
    assert {entry[1] for entry in log[:2]} == {"fast", "slow"}
    assert all(entry[0] == "build" for entry in log[:2])
    assert log[2:] == [("run", "fast", (1,)), ("run", "slow", (2,))] * 2


def test_two_forms_of_one_kernel_are_built_by_one_thread():
    log = []
    kernel = Kernel("list", log)
    first_call.run([launch(kernel, 1), launch(kernel, 2)], "key", torch.device("cpu"))
    assert [entry[:3] for entry in log[:2]] == [("build", "list", (1,)), ("build", "list", (2,))]
    assert log[0][3] == log[1][3] != threading.get_ident()


def test_what_does_not_build_is_told_and_tried_again():
    class Broken(Kernel):
        def warmup(self, *arguments, grid, **constants):
            raise RuntimeError("needs more shared memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="more shared memory"):
            first_call.run([launch(Broken("x", []))], "key", torch.device("cpu"))


SPECIALISATIONS = r"""
import contextlib
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

card = SimpleNamespace(multi_processor_count=132, total_memory=141 << 30)
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
torch.cuda.device = torch.cuda.device_of = lambda device: contextlib.nullcontext()
torch.cuda.get_device_properties = lambda device: card
built = []


def note(self, key, signature, device, *rest):
    built.append(self.fn.__name__)
    compiled = SimpleNamespace(
        run=lambda *x: None, launch_metadata=lambda *x: None, function=None, packed_metadata=None
    )
    self.device_caches[device][0][key] = compiled
    return compiled


JITFunction._do_compile = note

from gem_kernels.jagged_attention import hopper  # noqa: E402


def call(lengths, right=-1):
    o = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.zeros(sum(lengths), 4, 128, dtype=torch.bfloat16) for _ in range(3))
    sizes = (max(lengths), max(lengths), 0.1, -1, right)
    out, lse = hopper.forward(q, k, v, o, o, None, *sizes)
    hopper.backward(out, None, q, k, v, out, lse, o, o, None, False, *sizes)
    print(*sorted(built))
    built.clear()


call([700, 650, 700])
call([699, 333, 17, 1000])
call([1024] * 16)
call([700, 650, 700], right=0)
call([1], right=0)
"""


def test_other_lengths_build_nothing():
    """A forward and a backward need seven kernels once; a mask needs three of its own; short keys four."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SPECIALISATIONS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    attention = ["backward_kernel", "forward_kernel", "query_gradient_kernel"]
    short = ["build_tiles", "clear_without_keys", "row_statistics", "short_backward_kernel"]
    first = sorted([*attention, "row_statistics", *["build_tiles"] * 3])
    assert [line.split() for line in done.stdout.splitlines()] == [first, [], [], attention, short]
