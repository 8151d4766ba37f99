"""TorchRec's index tensors, kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gem_parallel.sparse import recat
from torchrec.distributed import dist_data

PLAIN = getattr(dist_data._get_recat, "__wrapped__", dist_data._get_recat)
QUESTIONS = [
    {"local_split": 3, "num_splits": 2},
    {"local_split": 2, "num_splits": 4, "stagger": 2},
    {"local_split": 0, "num_splits": 2},
    {"local_split": 2, "num_splits": 2, "device": torch.device("cpu"), "batch_size_per_rank": [4, 4]},
    {"local_split": 2, "num_splits": 2, "device": torch.device("cpu"), "batch_size_per_rank": [3, 5]},
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_same_answer_made_once(question):
    calls = []

    def make(*args):
        calls.append(args)
        return PLAIN(*args)

    keeping = recat.kept(make)
    want, got = PLAIN(**question), keeping(**question)
    assert (want is None) == (got is None)
    assert want is None or torch.equal(want, got)
    assert keeping(**question) is got
    assert len(calls) == 1
    if "batch_size_per_rank" in question:  # another question
        other = keeping(**question | {"batch_size_per_rank": [1, 7]})
        assert torch.equal(other, PLAIN(**question | {"batch_size_per_rank": [1, 7]}))
        assert len(calls) == 2


def test_torchrec_is_changed_once_and_let_be_where_it_has_no_such_function(monkeypatch):
    fake = SimpleNamespace(_get_recat=PLAIN)
    monkeypatch.setattr(recat, "dist_data", fake)
    recat.keep_recats()
    changed = fake._get_recat
    assert changed is not PLAIN
    recat.keep_recats()
    assert fake._get_recat is changed
    monkeypatch.setattr(recat, "dist_data", SimpleNamespace())
    recat.keep_recats()
