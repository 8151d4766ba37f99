"""Orders for logs of any size, balance, shared requests, worker processes, the tail of a growing log, the transfer."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time

import gem_data.batches.loader
import numpy as np
import pyarrow as pa
import pytest
import torch
from gem_data import (
    Collator,
    EventLog,
    Loader,
    LoaderConfig,
    TailLoader,
    append,
    build_log,
    from_table,
    prepare,
    time_split,
    to_device,
)
from gem_data.balance import LengthCost, imbalance, in_even_parts
from gem_data.batches.order import Cipher
from gem_data.batches.pack import pack
from gem_data.testing import (
    KillingCollator,
    brute_counter,
    brute_history,
    rich_events,
    rich_schema,
    small_events,
    small_schema,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def config(**options) -> LoaderConfig:
    return LoaderConfig(**{"batch_size": 12, "max_history": 4, "seed": 3, **options})


def ids(batch) -> list[int]:
    return batch.sample_ids.tolist()


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for k in sorted(value) for t in tensors(value[k])]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name))]
    return []


def same(a, b) -> None:
    x, y = tensors(a), tensors(b)
    assert len(x) == len(y) > 10
    assert all(s.equal(t) for s, t in zip(x, y, strict=True))
    assert [s.max_len for s in a.sequences.values()] == [s.max_len for s in b.sequences.values()]


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 400), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_the_cipher_is_a_permutation_in_any_pieces(n, seed, epoch):
    cipher = Cipher(n=n, seed=seed, epoch=epoch)
    whole = cipher(np.arange(n))
    assert sorted(whole.tolist()) == list(range(n))
    cut = n // 3
    assert [*cipher(np.arange(cut)).tolist(), *cipher(np.arange(cut, n)).tolist()] == whole.tolist()


def test_the_cipher_looks_uniform_and_is_the_same_in_every_version():
    where = np.array([Cipher(n=8, seed=11, epoch=e)(np.arange(8)).tolist().index(0) for e in range(4000)])
    assert ((np.bincount(where, minlength=8) - 500) ** 2 / 500).sum() < 24.3  # 0.1% point of chi-squared, 7 degrees
    big = Cipher(n=10**9, seed=1, epoch=0)(np.arange(20_000))
    assert abs(big.mean() / 1e9 - 0.5) < 0.01
    assert abs(np.corrcoef(big[1:], big[:-1])[0, 1]) < 0.03
    assert Cipher(n=10, seed=1, epoch=2)(np.arange(10)).tolist() == PINNED


PINNED = [2, 7, 0, 1, 5, 3, 8, 9, 6, 4]


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(12, 150),
    world=st.sampled_from([1, 2, 3, 6]),
    resumed_world=st.sampled_from([1, 2, 4, 12]),
    stop=st.integers(0, 20),
    permute=st.sampled_from(["sort", "cipher"]),
    balance=st.sampled_from(["none", "bbs", "lpt", "karmarkar-karp", "exchange"]),
    lazy=st.booleans(),
)
def test_exactly_once_with_every_order_and_balance(small_log, n, world, resumed_world, stop, permute, balance, lazy):
    rows = range(150 - n, 150) if lazy else np.arange(150 - n, 150)
    options = config(permute=permute, balance=balance, sub_batch=2)
    state, steps, seen = None, 0, []
    for size, limit in ((world, stop), (resumed_world, 10**6)):
        loaders = [Loader(small_log, rows, options, rank=r, world=size) for r in range(size)]
        for loader in loaders if state else []:
            loader.load_state_dict(json.loads(json.dumps(state)))
        while steps < limit and loaders[0].epoch == 0:
            for parts in zip(*loaders, strict=True):
                step = [i for part in parts for i in ids(part)]
                assert sorted(step) == sorted(loaders[0].global_rows(0, steps).tolist())
                seen += step
                steps += 1
                if steps == limit:
                    break
        state = loaders[0].state_dict()
        if loaders[0].epoch == 1:
            break
    assert len(set(seen)) == len(seen) == n - n % 12


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 150),
    world=st.sampled_from([1, 2, 5]),
    resumed_world=st.sampled_from([1, 3, 40]),
    stop=st.integers(0, 20),
    permute=st.sampled_from(["sort", "cipher"]),
    budget=st.sampled_from([1, 7, 40, 10**6]),
    cost=st.sampled_from([None, LengthCost(quadratic=0.25, linear=1, constant=1)]),
    piece=st.sampled_from([4, 10**6]),
)
def test_exactly_once_under_a_budget(small_log, n, world, resumed_world, stop, permute, budget, cost, piece):
    options = config(permute=permute, budget=budget, cost=cost, batch_size=50)
    events = Collator(small_log, max_history=4)
    state, steps, seen = None, 0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gem_data.batches.loader, "PIECE", piece)
        for size, limit in ((world, stop), (resumed_world, 10**6)):
            loaders = [Loader(small_log, range(150 - n, 150), options, rank=r, world=size) for r in range(size)]
            for loader in loaders if state else []:
                loader.load_state_dict(json.loads(json.dumps(state)))
            while steps < limit and loaders[0].epoch == 0:
                for parts in zip(*loaders, strict=True):
                    rows = loaders[0].global_rows(0, steps)
                    step = [i for part in parts for i in ids(part) if i >= 0]
                    assert sorted(step) == sorted(rows.tolist())
                    assert all(len(part) >= 1 for part in parts)
                    costs = (cost or LengthCost())(events.costs(rows))
                    assert len(rows) == 1 or (costs.sum() <= budget and len(rows) <= 50)
                    seen += step
                    steps += 1
                    if steps == limit:
                        break
            state = loaders[0].state_dict()
            if loaders[0].epoch == 1:
                break
    assert len(set(seen)) == len(seen) == n
    loader = Loader(small_log, range(150 - n, 150), options)
    assert steps == len(loader) == loader.steps_per_epoch
    order = np.concatenate([loader.global_rows(0, s) for s in range(steps)])
    costs = (cost or LengthCost())(events.costs(order))
    sizes = [len(loader.global_rows(0, s)) for s in range(steps)]
    for end in np.cumsum(sizes)[:-1]:  # no batch had room for the next sample
        size = sizes[int(np.searchsorted(np.cumsum(sizes), end))]
        assert size == 50 or costs[end - size : end + 1].sum() > budget


def test_a_budget_evens_out_the_ranks_and_is_part_of_a_position(tmp_path):
    from gem_data.sources import synthetic

    build_log(*synthetic.load(synthetic.SyntheticConfig(events=8000)), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    options = config(budget=20_000, batch_size=4096, max_history=200, workers=2)
    batches = [next(iter(Loader(log, range(len(log)), options, rank=r, world=8))) for r in range(8)]
    totals = [int(b.sequences["events"].offsets[-1]) for b in batches]
    assert 19_000 < sum(totals) <= 20_000
    assert max(totals) / np.mean(totals) < 1.01
    assert len({len(b) for b in batches}) > 1
    state = Loader(log, range(len(log)), options).state_dict()
    for other in ({"budget": 10_000}, {"cost": LengthCost(linear=2)}, {"budget": None}):
        with pytest.raises(ValueError, match="other data or settings"):
            Loader(log, range(len(log)), dataclasses.replace(options, **other)).load_state_dict(state)


def test_a_range_is_never_written_out(small_log):
    loader = Loader(small_log, range(150), config(permute="cipher"))
    assert isinstance(loader._rows, range)
    assert loader.global_rows(0, 3).tolist() != Loader(small_log, range(150), config()).global_rows(0, 3).tolist()
    with pytest.raises(ValueError, match="row 150 is outside"):
        Loader(small_log, range(10, 151), config(permute="cipher"))
    state = Loader(small_log, range(150), config()).state_dict()
    with pytest.raises(ValueError, match="permute None there, 'cipher' here"):
        Loader(small_log, range(150), config(permute="cipher")).load_state_dict(state)


def test_time_order_streams_the_past_first(small_log):
    loader = Loader(small_log, time_split(small_log).train, config(shuffle=False))
    times = [t for batch in loader for t in batch.time.tolist()]
    assert times == sorted(times)


def test_balance_evens_out_what_the_ranks_see(tmp_path):
    from gem_data.sources import synthetic

    build_log(*synthetic.load(synthetic.SyntheticConfig(events=8000, sigma=1.2)), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    worst = {}
    for method in ("none", "bbs"):
        options = LoaderConfig(
            batch_size=512, max_history=200, balance=method, sub_batch=8, cost=LengthCost(quadratic=1, linear=0)
        )
        cost = []
        for step in range(6):
            shares = [Loader(log, range(len(log)), options, rank=r, world=8).batch(0, step) for r in range(8)]
            cost.append([(b.sequences["events"].offsets.diff().double() ** 2).sum().item() for b in shares])
        worst[method] = np.mean([imbalance(np.array(c), np.arange(8)[:, None]) for c in cost])
    assert 1 <= worst["bbs"] < 1.1 < worst["none"]


@pytest.mark.parametrize("world", [1, 2])
def test_parts_of_a_batch_are_even_and_hold_the_same_samples(small_log, world):
    rows = np.arange(40)
    for rank in range(world):
        plain, parted = (
            Loader(small_log, rows, config(max_history=9, batch_size=20, parts=parts), rank=rank, world=world)
            for parts in (1, 3)
        )
        for one, other in zip(plain, parted, strict=True):
            assert sorted(ids(one)) == sorted(ids(other))
            lengths = np.stack([s.offsets.diff().numpy() for s in one.sequences.values()])
            assert ids(other) == [ids(one)[i] for i in in_even_parts(lengths, 3)]
        assert plain.state_dict() == parted.state_dict()  # a position means the same with and without


def test_shared_requests_in_a_loader(tmp_path):
    build_log(rich_events(100, times=6), rich_schema(counters=False), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    plain, shared = (Loader(log, np.arange(100), config(share_requests=s)) for s in (False, True))
    for a, b in zip(plain, shared, strict=True):
        assert b.sharing >= 1
        same(b.expanded(), a)
    assert plain.state_dict() == shared.state_dict()


# Packing and the transfer.


@settings(deadline=None, max_examples=20)
@given(rows=st.lists(st.integers(0, 99), max_size=9), share=st.booleans())
def test_packing_keeps_every_tensor(tmp_path_factory, rows, share):
    folder = tmp_path_factory.mktemp("log") / "log"
    build_log(rich_events(100), rich_schema(), folder)
    batch = Collator(EventLog.open(folder), max_history=4, share=share)(rows)
    again = pack(batch).unpack()
    same(again, batch)
    assert all(t.dtype == u.dtype for t, u in zip(tensors(again), tensors(batch), strict=True))


def test_moving_on_a_cpu_changes_nothing(small_log):
    loader = Loader(small_log, np.arange(100), config())
    for step, batch in enumerate(to_device(Loader(small_log, np.arange(100), config()), "cpu")):
        same(batch, loader.batch(0, step))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_device_ahead_and_whole(small_log):
    loader = Loader(small_log, np.arange(150), config())
    for depth in (1, 3):
        moved = to_device(Loader(small_log, np.arange(150), config(prefetch=2)), "cuda", depth=depth)
        count = 0
        for step, batch in enumerate(moved):
            torch.cuda._sleep(2_000_000)  # keeps the current stream busy, so that a copy that is not waited for shows
            same(batch.to("cpu"), loader.batch(0, step))
            count += 1
        assert count == len(loader)


# Worker processes.


@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_workers_give_the_same_batches_in_the_same_order(small_log, start):
    plain, many = (Loader(small_log, np.arange(150), config(workers=w, start=start)) for w in (0, 2))
    for a, b in zip(plain, many, strict=True):
        same(b, a)
        assert plain.state_dict() == many.state_dict()


def test_workers_leave_the_random_numbers_of_training_alone(small_log):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert list(Loader(small_log, np.arange(150), config(workers=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_leaving_the_loop_ends_the_workers(small_log):
    loader = Loader(small_log, np.arange(150), config(workers=2))
    for step, _ in enumerate(loader):
        if step == 2:
            break
    assert loader.state_dict()["step"] == 3
    assert ids(next(iter(loader))) == ids(loader.batch(0, 3))


def test_a_killed_worker_is_replaced_and_no_batch_is_lost(small_log, tmp_path):
    loader = Loader(small_log, np.arange(150), config(workers=2))
    expected = [ids(loader.batch(0, s)) for s in range(len(loader))]
    loader._collate = KillingCollator(small_log, tmp_path / "killed", expected[4][0])
    with pytest.warns(RuntimeWarning, match="worker process died .* going on with new ones"):
        got = [ids(batch) for batch in loader]
    assert (tmp_path / "killed").exists()
    assert got == expected


def test_a_worker_that_dies_again_and_again_is_an_error(small_log, tmp_path):
    loader = Loader(small_log, np.arange(150), config(workers=1, restarts=0))
    loader._collate = KillingCollator(small_log, tmp_path / "killed", int(loader.global_rows(0, 2)[0]))
    with pytest.raises(RuntimeError, match=r"worker process died .*fewer workers"):
        list(loader)


def test_what_a_worker_raises_is_raised_here(small_log, tmp_path):
    build_log(small_events(60), small_schema(), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    loader = Loader(log, np.arange(60), config(workers=1))
    with (tmp_path / "log" / "events.arrow").open("r+b") as file:
        file.write(b"changed")
    with pytest.raises(ValueError, match="was changed under the memory map"):
        list(loader)


def test_a_log_that_changes_under_the_map_is_noticed(tmp_path):
    build_log(small_events(60), small_schema(), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    collate = Collator(log, max_history=4)
    collate([1, 2])
    os.truncate(tmp_path / "log" / "events.arrow", 100)
    with pytest.raises(ValueError, match=r"changed under the memory map .* 100 now"):
        collate([1, 2])


# Logs that grow.


def grown(tmp_path, schema, tables) -> EventLog:
    prepare(from_table(tables[0], schema), tmp_path / "log", part_rows=20)
    for table in tables[1:]:
        append(tmp_path / "log", table)
    return EventLog.open(tmp_path / "log", expect=schema, verify=True)


@pytest.mark.parametrize("delay", [0, 35])
def test_histories_and_counters_reach_over_what_was_appended(tmp_path, delay):
    schema = dataclasses.replace(rich_schema(delay=delay))
    tables = [rich_events(30, seed=s, first=1000 + 150 * s) for s in range(3)]
    log = grown(tmp_path, schema, tables)
    assert len(log) == 90
    assert log.time[log.by_time].tolist() == sorted(log.time.tolist())
    limits = {"views": 5, "orders": 40}
    rows = np.random.default_rng(0).permutation(90)
    batch = Collator(log, max_history=limits)(rows)
    reached = 0
    for source, limit in limits.items():
        expected = [brute_history(log, int(r), limit, source) for r in rows]
        sequence = batch.sequences[source]
        assert sequence.offsets.diff().tolist() == [len(e) for e in expected]
        assert log.history_lengths(rows, limit, source).tolist() == [len(e) for e in expected]
        flat = [e for h in expected for e in h]
        assert sequence.time.tolist() == log.time[np.array(flat)].tolist()
        assert sequence.ids["item"].tolist() == log.column("item")[np.array(flat)].tolist()
        reached += sum(r >= 30 and any(e < 30 for e in h) for r, h in zip(rows.tolist(), expected, strict=True))
    assert reached > 10
    for i, counter in enumerate(schema.counters):
        for row in (5, 40, 70, 89):
            assert log.counters[row][i] == pytest.approx(brute_counter(log, counter.name, row), abs=1e-5), counter.name
    with pytest.raises(ValueError, match="use events"):
        log.history([1], 3)


def test_late_events_are_rejected_and_kept(tmp_path):
    schema = small_schema()
    prepare(from_table(small_events(40), schema), tmp_path / "log")
    last = EventLog.open(tmp_path / "log").manifest["time"][1]
    old = EventLog.open(tmp_path / "log")
    table = small_events(4, seed=1).set_column(1, "time", pa.array([last + 1, last, None, last - 5]))
    summary = append(tmp_path / "log", table)
    assert (summary.rows, summary.rejected) == (1, {"missing": 1, "late": 2})
    log = EventLog.open(tmp_path / "log", verify=True)
    assert len(log) == 41
    assert log.manifest["rejected"] == {"missing": 1, "late": 2}
    assert len((tmp_path / "log" / "rejects.jsonl").read_text().splitlines()) == 3
    assert Collator(old, max_history=3)([5, 39]).batch_size == 2  # readers keep what they have
    with pytest.raises(ValueError, match=r"no event to append .* among 4: 1 missing, 3 late"):
        append(tmp_path / "log", table)
    build_log(small_events(10), schema, tmp_path / "fixed")
    with pytest.raises(ValueError, match="can't grow"):
        append(tmp_path / "fixed", table)


@settings(deadline=None, max_examples=10)
@given(
    world=st.sampled_from([1, 2, 4]),
    resumed=st.sampled_from([1, 2, 4]),
    stop=st.integers(0, 12),
    balance=st.sampled_from(["none", "bbs"]),
    data=st.data(),
)
def test_the_tail_gives_every_event_once_in_order(tmp_path_factory, world, resumed, stop, balance, data):
    folder = tmp_path_factory.mktemp("log") / "log"
    schema = dataclasses.replace(small_schema(), counters=())
    prepare(from_table(small_events(30), schema), folder)
    pending = [small_events(data.draw(st.integers(1, 20)), seed=s, times=5) for s in range(1, 4)]

    def grow() -> bool:
        if not pending:
            return True
        table = pending.pop(0)
        first = EventLog.open(folder).manifest["time"][1]
        append(folder, table.set_column(1, "time", pa.array(table["time"].to_numpy() - 1000 + first + 1)))
        return False

    options = config(batch_size=8, balance=balance, sub_batch=1)
    seen, state = [], None
    for size, limit in ((world, stop), (resumed, 10**6)):
        loaders = [TailLoader(folder, options, rank=r, world=size, poll_s=0, idle_s=0) for r in range(size)]
        loaders[0].stop = grow
        for loader in loaders if state else []:
            loader.load_state_dict(json.loads(json.dumps(state)))
        iterators = [iter(loader) for loader in loaders]
        for _ in range(limit):
            parts = [next(i, None) for i in iterators]
            if parts[0] is None:
                break
            seen += [i for part in parts for i in ids(part)]
        state = loaders[0].state_dict()
    log = EventLog.open(folder)
    assert not pending
    expected = log.by_time[: len(log) - len(log) % 8].tolist()
    if balance == "none":
        assert seen == expected
    for step in range(0, len(expected), 8):  # who takes what is another matter than which come together
        assert sorted(seen[step : step + 8]) == sorted(expected[step : step + 8])
    assert state["position"] == len(seen)


def test_the_tail_waits_for_events_and_can_be_stopped(tmp_path):
    schema = dataclasses.replace(small_schema(), counters=())
    prepare(from_table(small_events(8), schema), tmp_path / "log")
    loader = TailLoader(tmp_path / "log", config(batch_size=8), poll_s=0.01)
    stream = iter(loader)
    assert len(next(stream)) == 8

    def later() -> None:
        time.sleep(0.1)
        table = small_events(8, seed=2)
        append(tmp_path / "log", table.set_column(1, "time", pa.array(np.arange(8) + 5000)))

    thread = threading.Thread(target=later)
    thread.start()
    assert next(stream).time.tolist() == list(range(5000, 5008))
    thread.join()
    loader.stop = lambda: True
    assert next(stream, None) is None
    with pytest.raises(ValueError, match="position 99 is outside"):
        loader.load_state_dict({**loader.state_dict(), "position": 99})
    with pytest.raises(ValueError, match="no equal share"):
        TailLoader(tmp_path / "log", config(batch_size=8), world=3)
    with pytest.raises(ValueError, match="not of a budget"):
        TailLoader(tmp_path / "log", config(batch_size=8, budget=9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "bsb"}, "did you mean 'bbs'"),
        ({"permute": "ciper"}, "did you mean 'cipher'"),
        ({"balance": "bbs", "drop_last": False}, "is for training"),
        ({"workers": -1}, "workers must be 0 or more"),
        ({"budget": 0}, "budget must be positive"),
        ({"budget": 9, "balance": "lpt"}, "balance must be 'none', not 'lpt'"),
        ({"budget": 9, "cost": len}, "expected a LengthCost"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)
