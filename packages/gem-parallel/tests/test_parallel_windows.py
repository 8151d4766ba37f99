"""Windows on a pretended card: memory that is zeroed late, and barriers that never end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from gem_parallel.comm.watch import Watch
from gem_parallel.comm.windows import CudaWindow


class Cards:
    """Two cards whose default streams are queues, and torch's symmetric memory of 2.11 on them.

    New memory is zeroed when the default stream comes to it. A barrier sends a signal into each peer's pad (0 becomes
    1) and takes those in one's own (1 becomes 0), as torch's kernel does; it gives up after `patience_s`.
    """

    def __init__(self, patience_s):
        self.patience_s = patience_s
        self.here = threading.local()
        self.streams = [ThreadPoolExecutor(1) for _ in range(2)]
        self.pads = [[0, 0], [0, 0]]
        self.all_there = threading.Barrier(2, timeout=30)
        self.signalled = threading.Event()

    def empty(self, nbytes, dtype, device):
        self.streams[self.here.rank].submit(self.zero, self.here.rank)
        return torch.empty(nbytes, dtype=dtype)

    def zero(self, rank):
        self.pads[rank] = [0, 0]

    def rendezvous(self, local, group):
        self.all_there.wait()
        return SimpleNamespace(barrier=lambda rank=self.here.rank: self.meet(rank), rank=self.here.rank, world_size=2)

    def meet(self, rank):
        other = 1 - rank
        self.until(lambda: self.pads[other][rank] == 0)
        self.pads[other][rank] = 1
        self.signalled.set()
        self.until(lambda: self.pads[rank][other] == 1)
        self.pads[rank][other] = 0

    def until(self, true):
        end = time.monotonic() + self.patience_s
        while not true():
            if time.monotonic() > end:
                raise TimeoutError("a signal was lost")
            time.sleep(0.001)

    def default_stream(self, device):
        return SimpleNamespace(synchronize=lambda rank=self.here.rank: self.streams[rank].submit(int).result())


@pytest.mark.parametrize("waits", [True, False], ids=["as it is", "without waiting for the zeros"])
def test_nobody_signals_into_a_window_that_is_zeroed_later(waits, monkeypatch):
    """Rank 1's card is busy when the window is made; rank 0 goes ahead."""
    cards = Cards(patience_s=20 if waits else 1)
    monkeypatch.setattr(symmetric, "empty", cards.empty)
    monkeypatch.setattr(symmetric, "rendezvous", cards.rendezvous)
    passing = SimpleNamespace(synchronize=int)
    monkeypatch.setattr(torch.cuda, "default_stream", cards.default_stream if waits else lambda device: passing)

    def rank(number):
        cards.here.rank = number
        if number == 1:  # busy until rank 0 has signalled; where it waits as it should, for a while
            cards.streams[1].submit(cards.signalled.wait, 0.3 if waits else 20)
        window = CudaWindow(64, None, torch.device("cpu"), kernels=True)
        if number == 0:
            window.barrier()
        else:
            cards.streams[1].submit(window.barrier).result()  # after what its card was busy with

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(rank, number) for number in range(2)]
        if waits:
            assert [r.result() for r in ranks] == [None, None]
        else:
            with pytest.raises(TimeoutError, match="a signal was lost"):
                ranks[1].result()
            ranks[0].exception()
    for stream in cards.streams:
        stream.shutdown()


def test_a_wait_that_lasts_too_long_is_named_and_others_are_forgotten():
    now, said, ended = [0.0], [], set()
    watch = Watch(10.0, end=said.append, pause_s=3600, clock=lambda: now[0])
    for i in range(4):
        watch.expect(i % 2, lambda i=i: i in ended, lambda i=i: f"rank {i} waits")
        now[0] += 1.0
    watch.look()
    assert (said, watch.pending) == ([], 4)
    ended |= {1, 3}
    watch.look()
    assert watch.pending == 2  # 2 comes behind 0
    now[0] = 10.5
    ended |= {0}
    watch.look()
    assert (said, watch.pending) == ([], 1)
    now[0] = 12.5
    watch.look()
    assert said == ["rank 2 waits (after 10 s, the limit is 10)"]
    ended |= {2}
    watch.look()
    assert (len(said), watch.pending) == (1, 0)


def test_the_watch_looks_by_itself_and_lets_go():
    said = []
    heard = threading.Event()
    watch = Watch(0.01, end=lambda text: (said.append(text), heard.set()), pause_s=0.005)
    watch.expect("here", lambda: False, lambda: "rank 0 waits")
    assert heard.wait(30)
    assert said[0].startswith("rank 0 waits (after 0 s")
    del watch


def test_a_process_that_waits_for_ever_ends_and_says_for_whom():
    script = (
        "import time\n"
        "from gem_parallel.comm.watch import Watch\n"
        "watch = Watch(0.05, pause_s=0.01)\n"
        "watch.expect(0, lambda: False, lambda: 'rank 3 waits for rank 5')\n"
        "def stuck():\n    time.sleep(60)\n"
        "stuck()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "rank 3 waits for rank 5 (after 0 s" in done.stderr
    assert "in stuck" in done.stderr  # where every thread is


def test_a_barrier_is_watched_and_names_who_is_missing(monkeypatch, capsys):
    """On a pretended stream; rank 1 of four waits for rank 2, which is one barrier behind."""
    written, events = [], []
    event = SimpleNamespace(record=lambda: events.append("recorded"), query=lambda: False)
    pad = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    handle = SimpleNamespace(
        rank=1,
        world_size=4,
        signal_pad_size=2048,
        signal_pad_ptrs=[1000, 5000, 9000, 13000],
        get_signal_pad=lambda rank, sizes, dtype, offset: pad if (rank, sizes, offset) == (1, (4,), 508) else None,
    )
    stream = SimpleNamespace(cuda_stream=7, synchronize=int)
    nothing = SimpleNamespace(__enter__=int)
    monkeypatch.setattr(symmetric, "empty", lambda nbytes, dtype, device: torch.empty(nbytes, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", lambda local, group: handle)
    for name, value in {
        "default_stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "is_current_stream_capturing": lambda: False,
        "Event": lambda: event,
        "Stream": lambda device: nothing,
        "device": lambda device: torch.no_grad(),
        "stream": lambda stream: torch.no_grad(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("gem_parallel.comm.windows._stream_value", lambda *call: written.append(call))
    said, now = [], [0.0]
    watch = Watch(5.0, end=said.append, pause_s=3600, clock=lambda: now[0])
    window = CudaWindow(64, None, torch.device("cpu"), watch=watch)
    window.barrier()
    window.barrier()
    first = 2048 - 16
    assert written[6:] == [
        *(("cuStreamWriteValue32_v2", 7, base + first + 4, 2) for base in (1000, 9000, 13000)),
        *(("cuStreamWaitValue32_v2", 7, 5000 + first + 4 * other, 2) for other in (0, 2, 3)),
    ]
    assert len(events) == 2
    watch._waits[id(window)].popleft()  # the first has ended
    now[0] = 6.0
    watch.look()
    assert said == [
        "rank 1 of 4 waits at barrier 2 of a window of 64 bytes for rank 2 (it came to 1): it died, hangs or left the "
        "common sequence (after 6 s, the limit is 5)"
    ]
    assert "asking the card" in capsys.readouterr().err
