"""How times and ceilings are taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

Run = Callable[[], Any]


def captured(run: Run) -> Run:
    """`run` as the replay of a CUDA graph, so that what Python costs is not in the time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = run()

    def replay() -> Any:
        graph.replay()
        return run, kept  # what the graph reads and writes lives as long as it

    return replay


CALLS = 5  # of a variant in a round, however long it takes


def median_ms(run: Run, rep: int) -> float:
    """Median time of a call in milliseconds over about `rep` milliseconds, or over `CALLS` calls if that is longer; the
    L2 cache flushed between calls.
    """
    import triton

    def median(rep: int) -> float:
        return float(triton.testing.do_bench(run, warmup=max(rep // 4, 3), rep=rep, return_mode="median"))

    once = median(1) if rep < 100 else 0.0
    return median(max(rep, round(CALLS * once)))


def kernels(run: Run, calls: int = 3) -> list[tuple[str, float, float]]:
    """What a call runs on the GPU, the longest first: name, launches of a call, and microseconds of them all, by
    torch's profiler.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = [(name, len(times) / calls, sum(times) / calls) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def interleaved(runs: Mapping[str, Run], *, rounds: int, rep: int) -> dict[str, float]:
    """Median over `rounds` of each run's median, in turns that begin with another run each and go backwards every other
    time: neither a slow spell of the card nor the heat of a neighbour falls on one of them.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        names = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
        for name in names if turn % 2 == 0 else names[::-1]:
            times[name].append(median_ms(runs[name], rep))
    return {name: statistics.median(t) for name, t in times.items()}


def ceilings(device: torch.device) -> dict[str, float]:
    """The rates of a large BF16 product, of a tensor-wise FP8 product and of a large copy (bytes read and written)."""
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    fa, fb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    gemm = median_ms(lambda: a @ b, 100)
    fp8 = median_ms(
        lambda: torch._scaled_mm(fa, fb.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True),
        100,
    )
    x = torch.empty(2**31, device=device, dtype=torch.uint8)
    y = torch.empty_like(x)
    copy = median_ms(lambda: y.copy_(x), 50)
    return {
        "gemm_bf16_tflops": 2 * n**3 / gemm / 1e9, "gemm_fp8_tflops": 2 * n**3 / fp8 / 1e9,
        "copy_tbps": 2 * x.numel() / copy / 1e9,
    }  # fmt: skip
