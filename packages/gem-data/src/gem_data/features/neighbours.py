"""Item-to-item collaborative filtering as a streaming counter: what those who rated alike things alike say of this one.

With x_e = the value of event e - what was usual for its item at the time, and of a key u at time t::

    m_u(t)    = sum of x over u's earlier events / (their number + prior)           what is usual for u
    z_e       = x_e - m_u(t_e)                                                     e an event of u
    A_ij, N_ij, Q_i  sums over the earlier events: A of z_e z_f and N of 1 over all pairs e, f of one key, e on i and f
                     on j; Q of z_e^2 over the events on i
    s_ij(t)   = A_ij / (sqrt(Q_i Q_j) + 1e-6) * N_ij / (N_ij + prior)               how alike i and j have been taken
    score     = sum_f s_if (x_f - m_u(t)) / (sum_f |s_if| + FEW)                   f u's earlier events

(Sarwar et al. 2001, with the shrinkage of Bell and Koren 2007.) "Earlier" is as everywhere: s + delay < t. Similarities
are of what was known at the time, of full rank, and go on changing after a model's training: what a table of learned
vectors cannot hold of few data, a model can read off this. One pass in order of time; sums grow in that order alone, so
nothing later can be in them.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEW = 0.3  # of similarity in all, half of which is not believed
TINY = 1e-6  # of what is left where nothing differs from what is usual, rounding is no likeness
MOST_EVENTS = 1024  # of a key, the latest, are compared

Array = NDArray[Any]


def neighbour_scores(
    key: Array, item: Array, time: Array, x: Array, *, prior: float, delay: int
) -> NDArray[np.float64]:
    """The score of each row, [n] float64; 0 without earlier events or without anything alike.

    key, item and time [n] int64, rows in any order; x [n] float64.
    """
    n, items = len(key), int(item.max(initial=0)) + 1
    score = np.zeros(n)
    alike, both = np.zeros((items, items)), np.zeros((items, items), np.float32)
    square = np.zeros(items)
    order = np.lexsort((np.arange(n), key, time))
    blocks = _blocks(time[order], key[order])
    known: dict[int, list[Array]] = {}  # of each key: items, x and z of its events so far
    usual = np.zeros(n)
    waiting = 0  # the first block that is not in the sums yet
    for low, high in blocks:
        now = time[order[low]]
        while waiting < len(blocks) and time[order[blocks[waiting][0]]] + delay < now:
            rows = order[slice(*blocks[waiting])]
            _learn(known, key, item, x, usual, rows, alike, both, square)
            waiting += 1
        rows = order[low:high]
        mine = known.get(int(key[rows[0]]))
        if mine is None:
            continue
        theirs, values, _ = mine
        mean = values.sum() / (len(values) + prior)
        usual[rows] = mean
        theirs, values = theirs[-MOST_EVENTS:], values[-MOST_EVENTS:]
        at = np.ix_(item[rows], theirs)
        n_ij = both[at].astype(np.float64)
        size = np.sqrt(square[item[rows], None] * square[theirs]) + TINY
        s = alike[at] / size * n_ij / (n_ij + prior)
        score[rows] = s @ (values - mean) / (np.abs(s).sum(axis=1) + FEW)
    return score


def _blocks(time: Array, key: Array) -> list[tuple[int, int]]:
    """Runs of rows of one time and key."""
    new = np.ones(len(time), bool)
    new[1:] = (time[1:] != time[:-1]) | (key[1:] != key[:-1])
    edges = [*np.flatnonzero(new).tolist(), len(time)]
    return list(itertools.pairwise(edges))


def _learn(
    known: dict[int, list[Array]],
    key: Array,
    item: Array,
    x: Array,
    usual: Array,
    rows: Array,
    alike: Array,
    both: Array,
    square: Array,
) -> None:
    """Take the events of one key and time into the sums: with its earlier ones, and with one another."""
    i, value = item[rows], x[rows]
    z = value - usual[rows]
    np.add.at(square, i, z * z)
    before = known.get(int(key[rows[0]]))
    if before is None:
        known[int(key[rows[0]])] = [i, value, z]
    else:
        j, z_j = before[0][-MOST_EVENTS:], before[2][-MOST_EVENTS:]
        product = z[:, None] * z_j
        for a, b, p in ((i[:, None], j, product), (j[:, None], i, product.T)):
            np.add.at(alike, (a, b), p)
            np.add.at(both, (a, b), np.float32(1.0))
        known[int(key[rows[0]])] = [np.concatenate(pair) for pair in zip(before, (i, value, z), strict=True)]
    if len(rows) > 1:
        a, b = np.nonzero(~np.eye(len(rows), dtype=bool))
        np.add.at(alike, (i[a], i[b]), z[a] * z[b])
        np.add.at(both, (i[a], i[b]), np.float32(1.0))
