"""The tile schedule: every valid tile once, none empty, in order of work, dealt evenly; the GPU's builder agrees
with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch
from gem_kernels import schedule
from gem_kernels.schedule import TileShape
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(0, 700), min_size=0, max_size=24)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@given(LENGTHS, st.data(), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_one_tile(own: list[int], data: st.DataObject, heads: int, consumers: int) -> None:
    other = data.draw(st.lists(st.integers(0, 700), min_size=len(own), max_size=len(own)))
    shape = TileShape(consumers=consumers)
    table = schedule.tiles(offsets(own), offsets(other), heads, shape)
    seen = torch.zeros(heads, sum(own))
    for start, rows, other_start, other_len, head, out_start, b, first in table.tolist():
        assert 0 < rows <= consumers * shape.block
        assert start == out_start == offsets(own)[b] + first * shape.block
        assert start + rows <= offsets(own)[b + 1]
        assert rows % shape.block == 0 or start + rows == offsets(own)[b + 1]
        assert (other_start, other_len) == (offsets(other)[b], other[b])
        seen[head, start : start + rows] += 1
    assert (seen == 1).all()
    assert len(table) <= shape.bound(sum(own), len(own), heads)
    assert (schedule.tile_work(table, shape).diff() <= 0).all()


def test_shared_queries_differ_in_where_they_go() -> None:
    table = schedule.tiles(torch.tensor([0, 100]), offsets([5, 0, 900]), 1, TileShape(consumers=1), shared_own=True)
    assert sorted((b, start, out) for start, _, _, _, _, out, b, _ in table.tolist()) == [
        (0, 0, 0), (0, 64, 64), (1, 0, 100), (1, 64, 164), (2, 0, 200), (2, 64, 264),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 131, 132, 133, 1000])
def test_zigzag_deals_one_row_forwards_the_next_backwards(count: int) -> None:
    owner = schedule.zigzag(count, 132)
    assert owner[:132].tolist() == list(range(132))[:count]
    assert owner[132:264].tolist() == list(range(131, -1, -1))[: max(count - 132, 0)]
    least, most = torch.bincount(owner, minlength=132).aminmax()
    assert most - least <= 1


def test_zigzag_removes_the_skew_of_long_tailed_lengths() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(300), 1.2, 256).astype(np.int64) + 1, 8192)
    shape = TileShape(consumers=3)
    table = schedule.tiles(offsets(lengths.tolist()), offsets(lengths.tolist()), 4, shape)
    weights = schedule.tile_work(table, shape)
    in_order = weights[np.lexsort((table[:, 0].numpy(), table[:, 4].numpy(), table[:, 6].numpy()))]
    before = schedule.skew(in_order, schedule.blocked(len(table), 132), 132)
    after = schedule.skew(weights, schedule.zigzag(len(table), 132), 132)
    best = schedule.skew(weights, schedule.longest_first(weights, 132), 132)
    assert before > 3 * after
    assert after < 1.1
    assert best <= after


def test_offsets_are_checked() -> None:
    with pytest.raises(ValueError, match="own_offsets must be 3 ascending"):
        schedule.tiles(torch.tensor([0, 5, 3]), torch.tensor([0, 1, 2]), 1, TileShape())
    with pytest.raises(ValueError, match="positive"):
        TileShape(block=0)


SCRIPT = """
import numpy as np, torch
from gem_kernels import schedule
from gem_kernels.hopper import tiles
rng = np.random.default_rng(3)
for batch, heads, consumers, shared in ((1, 1, 1, False), (7, 2, 2, False), (45, 4, 3, False), (9, 2, 2, True), (5, 1,
3, False)):
    own, other = (rng.integers(0, 700, batch) * (rng.random(batch) > 0.2) for _ in range(2))
    if batch == 5:
        own, other = own * 0, other * 0
    if shared:
        own = np.full(batch, 130)
    own, other = (torch.from_numpy(np.concatenate([[0], np.cumsum(x)])) for x in (own, other))
    shape = schedule.TileShape(consumers=consumers)
    given = own[:2] if shared else own
    expected = schedule.tiles(given, other, heads, shape, shared_own=shared)
    offsets = given.to(DEVICE), other.to(DEVICE, torch.int32)
    built = tiles.build(*offsets, int(own[-1]), heads, shape, shared_own=shared)
    n = int(built.count)
    assert n == len(expected), (n, len(expected))
    assert torch.equal(built.table[:n].cpu(), expected)
"""


def _run(device: str, **env: str) -> None:
    script = SCRIPT.replace("DEVICE", repr(device))
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(
    version("triton").startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="the interpreter of triton 3.6 needs numpy < 2.4",
)
def test_the_device_builder_agrees_in_the_interpreter() -> None:
    _run("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_the_device_builder_agrees_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    _run("cuda", TRITON_INTERPRET="0")
