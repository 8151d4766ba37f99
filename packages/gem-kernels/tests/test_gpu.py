"""What only a GPU can show: 64-bit addressing, one compilation for all token counts, CUDA graphs, torch.compile."""

import pytest
import torch
import torch._dynamo.testing
from gem_kernels import (
    block_attention,
    gdpa,
    jagged_add,
    jagged_attention,
    jagged_concat,
    jagged_split,
    layer_norm,
    most_recent,
    rms_norm,
    rope,
    tiled_attention,
)
from gem_kernels.dispatch import module
from gem_kernels.testing import offsets_of, random_heads, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def attend(q, k, v, offsets, longest, **options):
    return jagged_attention(q, k, v, offsets, offsets, longest, longest, backend="triton", **options)


def act(q, k, v, offsets, longest, **options):
    return gdpa(q, k, v, offsets, offsets, longest, longest, backend="triton", **options)


@pytest.mark.parametrize("op", [attend, act])
def test_rows_more_than_2_to_the_31_elements_apart(op):
    lengths, dim = [20, 13], 64
    offsets = offsets_of(lengths, "cuda")
    stride = 2**31 // 32 + 64
    buffer = torch.empty(32 * stride + dim, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((33, 1, dim), (stride, dim, 1))
    assert far[32].storage_offset() > 2**31
    near = random_heads(33, 1, dim, dtype=torch.bfloat16, device="cuda")
    far.copy_(near)
    far.requires_grad_()
    near.requires_grad_()
    results = []
    for x in (far, near):
        out = op(x, x, x, offsets, 20)
        loss_gradient = torch.ones_like(out)
        # the custom operators' own backward: a gradient for `far` as a leaf would need another such buffer
        results.append((out, torch.autograd.grad(out, x, loss_gradient)[0]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_norms_and_helpers_of_rows_more_than_2_to_the_31_elements_apart():
    width, rows = 64, 33
    stride = 2**31 // (rows - 1) + 64
    buffer = torch.empty((rows - 1) * stride + width, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((rows, width), (stride, 1))
    near = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    far.copy_(near)
    weight = torch.rand(width, device="cuda")
    a, b = offsets_of([20, 13], "cuda"), offsets_of([0, 33], "cuda")
    norm_backward = torch.ops.gem_kernels.norm_backward

    def run(x):
        return [
            *rms_norm(x, weight, residual=x, backend="triton"),
            layer_norm(x, weight, weight, swish=True, backend="triton"),
            *norm_backward(x, x, x, weight, weight, "layer", 1e-6, True, "triton"),
            most_recent(x, a, 5, backend="triton"),
            jagged_add(x, x[:2], a, backend="triton"),
            jagged_concat(x, x, a, b, backend="triton")[0],
            *jagged_split(x, offsets_of([10, 4], "cuda"), offsets_of([10, 9], "cuda"), 14, backend="triton"),
            torch.ops.gem_kernels.segment_sum(x, a, torch.float32, "triton"),
        ]

    for got, expected in zip(run(far), run(near), strict=True):
        assert torch.equal(got, expected)


def test_other_row_counts_compile_nothing_new_in_norms_and_helpers():
    norms, sequences = module("norms", "triton"), module("sequences", "triton")
    kernels = [norms.forward_kernel, norms.backward_kernel, norms.sum_kernel]
    kernels += [sequences._recent_kernel, sequences._recent_backward_kernel, sequences._join_kernel]
    kernels += [sequences._add_kernel, sequences._sum_kernel]

    def run(lengths):
        offsets = offsets_of(lengths, "cuda")
        x = torch.randn(sum(lengths), 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight = torch.ones(64, device="cuda", requires_grad=True)
        bias = torch.randn(len(lengths), 64, device="cuda", requires_grad=True)
        y = rms_norm(x, weight, backend="triton")
        both, offsets = jagged_concat(y, jagged_add(x, bias, offsets, backend="triton"), offsets, offsets)
        most_recent(both, offsets, 4, backend="triton").sum().backward()

    def compiled():
        return [len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()]

    run([16, 64])
    before = compiled()
    assert sum(before) >= len(kernels)
    for lengths in ([1], [1, 16, 127], [33] * 9, [512]):
        run(lengths)
    assert compiled() == before


def test_other_token_counts_and_maxima_compile_nothing_new():
    kernels = [tiled_attention.forward_kernel, tiled_attention.dq_kernel, tiled_attention.dkv_kernel]

    def run(lengths, extra):
        offsets = offsets_of(lengths, "cuda")
        q, k, v = (random_heads(sum(lengths), 2, 64, dtype=torch.bfloat16, device="cuda", seed=i) for i in range(3))
        for x in (q, k, v):
            x.requires_grad_()
        longest = max(lengths) + extra
        for op in (attend, act):
            torch.autograd.grad(op(q, k, v, offsets, longest, causal=True).sum(), (q, k, v))

    def compiled():
        return [len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()]

    run([16, 64], 0)
    before = compiled()
    assert sum(before) >= len(kernels)
    for lengths, extra in (([1], 0), ([1, 16, 127], 1), ([33] * 9, 0), ([512], 512)):
        run(lengths, extra)
    assert compiled() == before


@pytest.mark.parametrize("op", [attend, act])
def test_nothing_waits_for_the_device(op):
    offsets = offsets_of([50, 40, 6], "cuda")
    q, k, v = (random_heads(96, 2, 64, dtype=torch.bfloat16, device="cuda", seed=i).requires_grad_() for i in range(3))

    def step():
        out = op(q, k, v, offsets, 50, causal=True)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_replays_with_other_lengths():
    total, longest = 96, 96
    offsets = offsets_of([50, 40, 6], "cuda")
    q, k, v = (random_heads(total, 2, 64, dtype=torch.bfloat16, device="cuda", seed=i) for i in range(3))

    def run():
        out = attend(q, k, v, offsets, longest, causal=True) + act(q, k, v, offsets, longest)
        return out + block_attention(rope(q, offsets, backend="triton"), k, v, offsets, rope=10.0, backend="triton")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths in ([50, 40, 6], [1, 90, 5], [96, 0, 0], [0, 33, 63]):
        offsets.copy_(offsets_of(lengths, "cuda"))
        graph.replay()
        assert torch.equal(out, run())


def test_inductor_makes_one_graph_for_all_lengths():
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def model(q, k, v, offsets, longest):
        return attend(q * 2, k, v, offsets, longest, causal=True) + rope(act(q, k, v, offsets, longest), offsets) * 3

    compiled = []
    for lengths in ([50, 40, 6], [7, 90], [33, 65, 12, 4]):
        offsets = offsets_of(lengths, "cuda")
        q, k, v = (random_heads(sum(lengths), 2, 64, dtype=torch.bfloat16, device="cuda", seed=i) for i in range(3))
        q.requires_grad_()
        out = model(q, k, v, offsets, max(lengths))
        expected = attend(q * 2, k, v, offsets, max(lengths), causal=True)
        expected = expected + rope(act(q, k, v, offsets, max(lengths)), offsets) * 3
        assert relative_error(out, expected) < 2**-7
        out.sum().backward()
        compiled.append(counter.frame_count)
    # The first call may take two: dynamic=True makes symbols of float defaults, and the compiler starts over once.
    assert compiled[1:] == compiled[:1] * 2
