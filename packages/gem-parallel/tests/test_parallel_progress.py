"""Barriers end whatever holds up the hosts: the calls that collectives of windows make, on cards that are queues."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from gem_parallel.comm import windows
from gem_parallel.comm.fsdp import CopyEngineAllGather, CopyEngineReduceScatter
from gem_parallel.comm.tables import CopyEngineTableGather
from gem_parallel.comm.windows import CudaWindow, Ring

SIGNAL, WAIT = "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"
PAD = 2048


def ends(programs, *, held, one_queue=False):
    """Whether every rank comes to the end of its program of (function, stream, address, number).

    A stream is a queue; with `one_queue` those of a card are one, as streams are that share a channel of the hardware.
    Hosts that are `held` wait, after every call, for all that their cards were given. Numbers only rise, so that what
    can happen stays possible: the order in which ranks and queues are looked at decides nothing.
    """
    hosts = [deque(program) for program in programs]
    queues = [defaultdict(deque) for _ in programs]
    memory: dict[int, int] = defaultdict(int)
    moved = True
    while moved:
        moved = False
        for host, streams in zip(hosts, queues, strict=True):
            for queue in streams.values():
                while queue and (queue[0][0] == SIGNAL or memory[queue[0][2]] >= queue[0][3]):
                    function, _stream, address, number = queue.popleft()
                    moved = True
                    if function == SIGNAL:
                        memory[address] = number
            while host and not (held and any(streams.values())):
                streams[0 if one_queue else host[0][1]].append(host[0])
                host.popleft()
                moved = True
    return not any(hosts) and not any(queue for streams in queues for queue in streams.values())


def collectives(monkeypatch, rank, size):
    """What rank `rank` of `size` calls: gathers that read and that write, reductions and a table's gather, on streams
    of their own and more often than a ring has windows.
    """
    calls, stream, made = [], [0], [0]

    def rendezvous(local, group):
        made[0] += 1
        pads = [10**9 * (r + 1) + 10**4 * made[0] for r in range(size)]
        parts = [local.clone() for _ in range(size)]
        return SimpleNamespace(
            rank=rank, world_size=size, signal_pad_size=PAD, signal_pad_ptrs=pads, get_buffer=lambda r, *_: parts[r]
        )

    current = lambda device=None: SimpleNamespace(cuda_stream=stream[0], synchronize=int)  # noqa: E731
    monkeypatch.setattr(symmetric, "empty", lambda nbytes, dtype, device: torch.zeros(nbytes, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "default_stream", current)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: size)
    monkeypatch.setattr(windows, "_stream_value", lambda *call: calls.append(call))
    card = torch.device("cpu")
    read, written = CopyEngineAllGather(Ring(None, 2)), CopyEngineAllGather(Ring(None, 2), pushes=True)
    reduced, table = CopyEngineReduceScatter(Ring(None, 2)), CopyEngineTableGather(None, CudaWindow)
    fraction = table.place(torch.zeros(2, 4))
    for step in range(5):
        stream[0] = 3
        pending = table.start(torch.empty(8 * size), fraction)
        for number, gather in enumerate((read, written)):
            stream[0] = 1 + number * (step % 2)
            out = gather.allocate((4 * size,), dtype=torch.float32, device=card)
            gather(out, out[4 * rank : 4 * rank + 4], None)
        pending.wait()
        stream[0] = 4
        whole = reduced.allocate((4 * size,), dtype=torch.float32, device=card)
        part = reduced.allocate((4,), dtype=torch.float32, device=card)
        reduced(part, whole.zero_(), None, dist.ReduceOp.SUM)
        del out, whole
    return calls


@pytest.mark.parametrize("size", [2, 3, 8])
def test_barriers_end_though_every_host_waits_for_its_card_after_every_call(size, monkeypatch):
    programs = [collectives(monkeypatch, rank, size) for rank in range(size)]
    assert {call[0] for call in programs[0]} == {SIGNAL, WAIT}
    assert len(programs[0]) == 5 * 4 * 2 * 2 * (size - 1)  # steps, collectives, barriers, signals and waits
    for one_queue in (False, True):
        assert ends(programs, held=True, one_queue=one_queue)
    # A rank that does not come is waited for.
    assert not ends([*programs[1:], programs[0][: -2 * (size - 1)]], held=False)


def test_what_would_hang(monkeypatch):
    """Each condition that the proof needs, broken: the model sees it."""
    first, second = (collectives(monkeypatch, rank, 2) for rank in range(2))
    assert ends([first, second], held=True)
    # Signals behind the waits: for ever in one queue, and where streams are apart as soon as a host is held up.
    behind = [
        [call for pair in zip(program[1::2], program[::2], strict=True) for call in pair] for program in (first, second)
    ]
    apart = [[(f, stream + 10 * (f == SIGNAL), *more) for f, stream, *more in program] for program in behind]
    assert not ends(behind, held=False)
    assert ends(apart, held=False)
    assert not ends(apart, held=True)
    # Two collectives the other way round on one rank: well while streams are apart and no host is held up.
    turned = [*second[4:8], *second[:4], *second[8:]]
    assert {call[1] for call in second[:4]} != {call[1] for call in second[4:8]}
    assert ends([first, turned], held=False)
    assert not ends([first, turned], held=True)
    assert not ends([first, turned], held=False, one_queue=True)
