"""How times and ceilings are taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Run = Callable[[], Any]
GEMM_FLOPS = 2 * 8192**3


def median_ms(run: Run, rep: int) -> float:
    """Median time of a launch in milliseconds, the L2 cache flushed between launches."""
    import triton

    return float(triton.testing.do_bench(run, warmup=max(rep // 4, 5), rep=rep, return_mode="median"))


def captured(run: Run) -> Run:
    """`run` as the replay of a CUDA graph, so that what Python costs is not in the time.

    All of it, and the warm-up before, is on one stream of its own: a backward pass runs on the stream of its forward.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = run()
    kept = run, outputs  # what the graph reads and writes: capturing the next one would give its memory back

    def replay() -> Any:
        graph.replay()
        return kept[1]

    return replay


def interleaved(
    runs: Mapping[str, Run], *, rounds: int, rep: int, failed: Callable[[str, Exception], None] | None = None
) -> dict[str, float]:
    """Median over `rounds` of each run's median; the runs take turns, every other round backwards, so that neither a
    slow spell of the card nor the heat of a neighbour falls on one of them.

    failed: told of a run that raises, which then has no time; None raises.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(times) if turn % 2 == 0 else list(times)[::-1]:
            try:
                times[name].append(median_ms(runs[name], rep))
            except Exception as error:  # whatever it throws is the finding
                if failed is None:
                    raise
                failed(name, error)
                del times[name]
    return {name: statistics.median(t) for name, t in times.items()}


def gemm(device: torch.device) -> Run:
    """The product whose rate is G, 8192^3 on random data: a run to time beside others, GEMM_FLOPS of them."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


def copy_of(moved: int, device: torch.device) -> Run:
    """A kernel that reads half of `moved` bytes and writes as many: what memory gives a run of that length, its start
    and end included, where the ceiling is that of a copy of 4 GiB. (A copy in a graph is no kernel, and slower.)
    """
    source = torch.zeros(moved // 8, device=device, dtype=torch.int32)
    target = torch.empty_like(source)
    return lambda: (torch.bitwise_not(source, out=target),)


def sm_ghz(run: Run, ms: float) -> float:
    """The SMs' clock in GHz at the end of `ms` milliseconds of `run`, which a card lowers to keep within its power.

    A kernel of one warp waits 200 us, right behind the last launch, and counts cycles.
    """
    from gem_kernels.bench.clock import cycles

    probe = torch.empty(2, dtype=torch.int64, device="cuda")
    cycles(probe)  # compiled before
    run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    launched = 0
    while (time.perf_counter() - begun) * 1e3 < ms:
        run()
        launched += 1
        if launched % 32 == 0:
            torch.cuda.synchronize()
    cycles(probe)
    counted, ns = probe.tolist()
    return float(counted) / ns


def host_us(run: Run, calls: int = 10) -> float:
    """What a call costs the CPU in microseconds, the device working behind."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    spent = time.perf_counter() - begun
    torch.cuda.synchronize()
    return spent / calls * 1e6


def ceilings(device: torch.device) -> dict[str, float]:
    """The rates of a large matrix product on random data and of a large copy (bytes read and written)."""
    product = median_ms(gemm(device), 150)
    x = torch.randint(0, 255, (2**31,), device=device, dtype=torch.uint8)
    y = torch.empty_like(x)
    copy = median_ms(lambda: y.copy_(x), 60)
    return {"gemm_bf16_tflops": GEMM_FLOPS / product / 1e9, "copy_tbps": 2 * x.numel() / copy / 1e9}
