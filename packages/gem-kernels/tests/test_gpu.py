"""What only a GPU can show: 64-bit addressing, one compilation for all token counts, CUDA graphs, torch.compile."""

import pytest
import torch
import torch._dynamo.testing
from gem_kernels import block_attention, gdpa, jagged_attention, rope
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


def test_other_token_counts_and_maxima_compile_nothing_new():
    kernels = [
        getattr(module(op, "triton"), name)
        for op in ("jagged_attention", "gdpa")
        for name in ("_forward_kernel", "_dq_kernel", "_dkv_kernel")
    ]

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

    for lengths in ([50, 40, 6], [7, 90], [33, 65, 12, 4]):
        offsets = offsets_of(lengths, "cuda")
        q, k, v = (random_heads(sum(lengths), 2, 64, dtype=torch.bfloat16, device="cuda", seed=i) for i in range(3))
        q.requires_grad_()
        out = model(q, k, v, offsets, max(lengths))
        expected = attend(q * 2, k, v, offsets, max(lengths), causal=True)
        expected = expected + rope(act(q, k, v, offsets, max(lengths)), offsets) * 3
        assert relative_error(out, expected) < 2**-7
        out.sum().backward()
    assert counter.frame_count == 1
