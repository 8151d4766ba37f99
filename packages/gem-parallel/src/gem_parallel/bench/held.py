"""Which calls hold up a host while a stream of its card waits for a number, as at windows, or while a kernel runs.

Each call is made twice in both cases, the first time in a fresh state: a kernel that was not launched, a module not
loaded. It "waited" when what the card was held by had ended before it returned. Barriers of windows allow all of them
(docs/notes/parallel.md); a host that gives a signal behind the wait for it must make none that waits in between.
CUDA_MODULE_LOADING=EAGER loads torch's kernels at the start instead of at their first launch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from gem_parallel.comm.windows import _driver, _stream_value

Call = Callable[[int], Any]  # in the first or the second fresh state
Hold = Callable[[], torch.cuda.Event]  # the event behind it
CONTROLS = ("a kernel launched before", "a number written", "a number read back", "synchronise")
WRITER = """
import mmap, struct, sys, time
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 4096)
for line in sys.stdin:
    time.sleep(float(sys.argv[2]))
    memory[:4] = struct.pack("i", int(line))
"""
MODULE = b".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    parser.add_argument("--hold", type=float, default=0.3, help="seconds that the card is held")


def run(args: argparse.Namespace) -> int:
    """A line for each call; 1 when the probe does not tell waiting from passing."""
    if not torch.cuda.is_available():
        raise SystemExit("held: needs a CUDA device")
    seen = {}
    with Number(args.hold) as number:
        holds, beside = number.holds(), torch.cuda.Stream()
        for hold in holds.values():
            hold()
        torch.cuda.synchronize()
        card, loading = torch.cuda.get_device_name(), os.environ.get("CUDA_MODULE_LOADING", "not set")
        print(f"{card}, torch {torch.__version__}, CUDA_MODULE_LOADING {loading}; the card is held for {args.hold} s")
        for name, call in calls().items():
            said = []
            for fresh, (held, hold) in enumerate(holds.items()):
                for turn in ("first", "again"):
                    seen[name, held, turn], what = timed(hold, call, fresh, beside)
                    said.append(f"{held}, {turn}: {what}")
            print(f"{name:32s} {'; '.join(said)}", flush=True)
    good = all(waited == (name == "synchronise") for (name, *_), waited in seen.items() if name in CONTROLS)
    print("the controls are as they should be" if good else "WRONG: a control waited that should not have, or passed")
    return 0 if good else 1


def timed(hold: Hold, call: Call, fresh: int, beside: torch.cuda.Stream) -> tuple[bool, str]:
    """Whether the hold was over when the call returned; the same in words."""
    torch.cuda.synchronize()
    end, failed = hold(), ""
    began = time.perf_counter()
    with torch.cuda.stream(beside):
        try:
            call(fresh)
        except Exception as error:  # torch's or the driver's; the next call is another matter
            failed = f" FAILED: {' '.join(str(error).split())[:200]}"
    ms = (time.perf_counter() - began) * 1e3
    waited = end.query()
    torch.cuda.synchronize()
    return waited, f"{'WAITED' if waited else 'passed'} {ms:6.1f} ms{failed}"


def calls() -> dict[str, Call]:
    """What a host may do in the middle of training, made in a stream of its own."""
    x, y = torch.rand(1024, device="cuda"), torch.empty(1024, device="cuda")
    pad = torch.zeros(1, dtype=torch.int32, device="cuda")
    halves = [torch.ones(256, 256, device="cuda", dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    products = [torch.empty_like(half) for half in halves]
    kernels = (torch.atan, torch.log1p)  # that torch has built, not such as it builds when they are asked for
    memory: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    graphs: list[torch.cuda.CUDAGraph] = []
    y.add_(1)
    y[:1].tolist()

    def stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    def load(_fresh: int) -> None:
        module, function, nothing = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        one = (ctypes.c_uint(1),) * 6  # grid and block
        check(_driver().cuModuleLoadData(ctypes.byref(module), MODULE))
        check(_driver().cuModuleGetFunction(ctypes.byref(function), module, b"nothing"))
        check(_driver().cuLaunchKernel(function, *one, ctypes.c_uint(0), ctypes.c_void_p(stream()), nothing, nothing))

    def give_back(_fresh: int) -> None:
        memory.pop()
        torch.cuda.empty_cache()

    def capture(_fresh: int) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        y.add_(1)
        graph.capture_end()
        graphs.append(graph)

    def replay(_fresh: int) -> None:
        graphs.insert(0, graphs.pop())
        graphs[0].replay()

    def window(_fresh: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        kept.append(symmetric.empty(2**21, dtype=torch.uint8, device=x.device))

    return {
        "a kernel of torch": lambda fresh: kernels[fresh](x, out=y),
        "a module of kernels, as Triton's": load,
        "memory allocated": lambda _: memory.append(torch.empty(2**28, dtype=torch.uint8, device="cuda")),
        "memory given back": give_back,
        "memory pinned": lambda _: kept.append(torch.empty(2**23, dtype=torch.uint8, pin_memory=True)),
        "a product": lambda fresh: torch.mm(halves[fresh], halves[fresh], out=products[fresh]),
        "a graph captured": capture,
        "a graph replayed": replay,
        "memory of a window": window,
        "a stream made": lambda _: torch.cuda.Stream(),
        "a kernel launched before": lambda _: y.add_(1),
        "a number written": lambda _: _stream_value("cuStreamWriteValue32_v2", stream(), pad.data_ptr(), 1),
        "a number read back": lambda _: y[:1].tolist(),
        "synchronise": lambda _: torch.cuda.synchronize(),
    }


def check(status: int) -> None:
    """Of the driver."""
    if status:
        raise RuntimeError(f"the driver's error {status}")


class Number:
    """A number in host memory for which streams can wait, and a process that writes it `hold` seconds after it is told
    to: no lock of the interpreter or the driver keeps it from that.
    """

    def __init__(self, hold: float) -> None:
        self.hold, self._given = hold, 0
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Number:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        file = self._open.enter_context(tempfile.NamedTemporaryFile(dir=folder))
        file.truncate(4096)
        self.memory = torch.from_file(file.name, shared=True, size=1024, dtype=torch.int32)
        command = [sys.executable, "-c", WRITER, file.name, str(self.hold)]
        self._writer = self._open.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
        self._ask()
        while self._writer.poll() is None and int(self.memory[0]) < self._given:  # until it runs
            time.sleep(0.01)
        torch.zeros(1, device="cuda")  # makes the card's context current
        pointer, address = self.memory.data_ptr(), ctypes.c_uint64()
        check(int(torch.cuda.cudart().cudaHostRegister(pointer, 4096, 2)))  # mapped for the card
        check(_driver().cuMemHostGetDevicePointer_v2(ctypes.byref(address), ctypes.c_void_p(pointer), ctypes.c_uint(0)))
        self.address = address.value
        return self

    def __exit__(self, *_: object) -> None:
        self.memory[0] = 2**30  # for whoever still waits
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
        assert self._writer.stdin is not None
        self._writer.stdin.close()
        self._open.close()

    def _ask(self) -> None:
        self._given += 1
        assert self._writer.stdin is not None
        self._writer.stdin.write(f"{self._given}\n")
        self._writer.stdin.flush()

    def holds(self) -> dict[str, Hold]:
        """Ways to hold the card, in a stream of their own."""
        stream = torch.cuda.Stream()

        def wait() -> torch.cuda.Event:
            self._ask()
            _stream_value("cuStreamWaitValue32_v2", stream.cuda_stream, self.address, self._given)
            return stream.record_event()

        def spin() -> torch.cuda.Event:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(self.hold * 2e9))  # a card counts about 2 GHz
            return stream.record_event()

        return {"stream waits": wait, "kernel runs": spin}
