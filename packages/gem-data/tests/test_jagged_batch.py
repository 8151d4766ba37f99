from __future__ import annotations

import numpy as np
import pytest
import torch
from gem_data import Collator, JaggedBatch
from hypothesis import given, settings
from hypothesis import strategies as st

indices = st.lists(st.integers(0, 149), max_size=12)


def same(a: JaggedBatch, b: JaggedBatch) -> None:
    """Equal in every tensor, and in dtypes."""
    for name in ("dense", "time", "labels", "label_mask", "weights", "sample_ids", "groups"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0)
    for name, ids in a.sparse.items():
        torch.testing.assert_close(ids.values, b.sparse[name].values, rtol=0, atol=0)
        torch.testing.assert_close(ids.offsets, b.sparse[name].offsets, rtol=0, atol=0)
    x, y = a.sequences["events"], b.sequences["events"]
    assert x.max_len == y.max_len
    for u, v in [(x.time, y.time), (x.offsets, y.offsets), *((x.ids[k], y.ids[k]) for k in x.ids)]:
        torch.testing.assert_close(u, v, rtol=0, atol=0)
    for k in x.floats:
        torch.testing.assert_close(x.floats[k], y.floats[k], rtol=0, atol=0)


@settings(deadline=None, max_examples=30)
@given(rows=indices, data=st.data())
def test_select_slice_and_concat_are_what_collate_gives(small_log, rows, data):
    collate = Collator(small_log, max_history=6)
    batch = collate(rows)
    b = data.draw(st.integers(0, len(rows)))
    a = data.draw(st.integers(0, b))
    same(batch.slice(a, b), collate(rows[a:b]))
    same(JaggedBatch.concat([batch.slice(0, a), batch.slice(a, b), batch.slice(b, len(rows))]), batch)
    if rows:
        index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
        same(batch.select(index), collate([rows[i] for i in index]))
        same(batch.select(torch.tensor(index, dtype=torch.int64)), batch.select(index))


def test_sparse_ids_may_be_many_per_sample(small_log):
    from gem_data import JaggedIds

    ids = JaggedIds(values=torch.arange(6), offsets=torch.tensor([0, 2, 2, 6]))
    chosen = ids.select(torch.tensor([2, 1, 0]))
    assert chosen.values.tolist() == [2, 3, 4, 5, 0, 1]
    assert chosen.offsets.tolist() == [0, 4, 4, 6]
    assert JaggedIds.concat([ids.slice(0, 1), ids.slice(1, 3)]).offsets.tolist() == ids.offsets.tolist()
    assert ids.slice(1, 3).offsets.tolist() == [0, 0, 4]


def test_slices_share_memory_and_the_batch_stays_as_it_was(small_log):
    batch = Collator(small_log, max_history=6)(np.arange(100, 110))
    part = batch.slice(3, 7)
    assert part.dense.data_ptr() == batch.dense[3].data_ptr()
    assert part.sequences["events"].offsets[0] == 0
    assert len(batch) == batch.batch_size == 10
    assert batch.sample_ids.tolist() == list(range(100, 110))


def test_to_moves_every_tensor(small_log):
    batch = Collator(small_log, max_history=6)(np.arange(100, 110)).to("meta")
    sequence = batch.sequences["events"]
    tensors = [batch.dense, batch.time, batch.labels, batch.label_mask, batch.weights, batch.sample_ids, batch.groups]
    tensors += [sequence.time, sequence.offsets, *sequence.ids.values(), *sequence.floats.values()]
    tensors += [t for ids in batch.sparse.values() for t in (ids.values, ids.offsets)]
    assert {t.device.type for t in tensors} == {"meta"}
    assert isinstance(sequence.max_len, int)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_go_to_the_device_and_back(small_log):
    batch = Collator(small_log, max_history=6)(np.arange(100, 150))
    pinned = batch.pin_memory()
    assert pinned.sequences["events"].ids["item"].is_pinned()
    on_device = pinned.to("cuda", non_blocking=True)
    same(on_device.to("cpu"), batch)
    same(on_device.select([3, 1, 1]).to("cpu"), batch.select([3, 1, 1]))
    same(JaggedBatch.concat([on_device.slice(0, 20), on_device.slice(20, 50)]).to("cpu"), batch)


def test_wrong_indices_and_parts(small_log):
    collate = Collator(small_log, max_history=6)
    batch = collate([1, 2, 3])
    with pytest.raises(IndexError, match="samples 0 to 3 of a batch of 3"):
        batch.select([0, 3])
    with pytest.raises(IndexError, match="samples -1 to 0"):
        batch.select([0, -1])
    with pytest.raises(IndexError, match="samples 2:5 of a batch of 3"):
        batch.slice(2, 5)
    with pytest.raises(ValueError, match="at least one batch"):
        JaggedBatch.concat([])
    other = JaggedBatch(**{**vars(batch), "sparse": {}})
    with pytest.raises(ValueError, match="batches differ in sparse"):
        JaggedBatch.concat([batch, other])
