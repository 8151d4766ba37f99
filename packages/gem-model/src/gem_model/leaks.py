"""The leak self-test: does any score know an outcome that its moment does not?

Change the outcomes at or after a time t, rebuild everything that is made of them (histories, features, statistics),
score again: no score of a row at or before t may move. Whatever path an outcome takes into a score, this finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Scores at or before ``cut`` that moved with the outcomes at or after it.

    Attributes:
        cut: t, in the units of the rows' times.
        rows: [n] int64, the rows whose scores moved.
        largest: by how much, at most.
    """

    cut: int
    rows: Tensor
    largest: float

    def __str__(self) -> str:
        some = ", ".join(map(str, self.rows[:5].tolist()))
        return (
            f"{len(self.rows)} scores at or before {self.cut} moved with outcomes at or after it, by up to "
            f"{self.largest:.3g}: rows {some}{', ...' if len(self.rows) > 5 else ''}"
        )


def find_leaks(
    score: Callable[[Tensor], Tensor],
    time: Tensor,
    outcomes: Tensor,
    *,
    cuts: Iterable[int] | None = None,
    perturb: Callable[[Tensor], Tensor] = lambda y: 1 - y,
    atol: float = 1e-6,
) -> list[Leak]:
    """Look for scores that know the future.

    Args:
        score: outcomes [N, ...] -> scores [N] or [N, K] of all N rows, by a model that stays as it is but with inputs
            made anew of these outcomes. Must be deterministic: a model in eval mode.
        time: [N] integers, when each row's score is asked for.
        outcomes: [N, ...], what became of each row: labels, ratings.
        cuts: the times t to try; by default the quartiles of ``time``, whatever ties there are.
        perturb: what replaces outcomes; must change each of them. By default 0 and 1 change places.
        atol: how far a score may move by rounding.

    Returns:
        the leaks, one a cut that has any; empty where there is none.

    Raises:
        ValueError: where the test could not find a leak: ``score`` is not deterministic or not finite, ``perturb``
            leaves an outcome as it is, or no score of any row moves at any cut, the later ones included.
    """
    before = score(outcomes).detach()
    if not bool(torch.isfinite(before).all()) or not torch.equal(score(outcomes), before):
        raise ValueError("the scores are not finite or not deterministic: put the model in eval mode")
    if cuts is None:
        ranked = time.sort().values
        cuts = sorted({int(ranked[len(ranked) * part // 4]) for part in (1, 2, 3)})
    leaks, reacting = [], False
    for cut in cuts:
        late = time >= cut
        changed = outcomes.clone()
        changed[late] = perturb(outcomes[late])
        if not bool((changed[late] != outcomes[late]).all()):
            raise ValueError(f"perturb leaves some of the {int(late.sum())} outcomes at or after {cut} as they are")
        moves = (score(changed).detach() - before).abs().reshape(len(time), -1).amax(1)  # [N]
        reacting |= bool((moves > atol).any())
        rows = ((time <= cut) & ~(moves <= atol)).nonzero()[:, 0]
        if len(rows):
            leaks.append(Leak(cut=cut, rows=rows, largest=float(moves[rows].max())))
    if not reacting:
        raise ValueError("no score moved with any outcome: score does not read them, so this test says nothing")
    return leaks


def assert_no_leak(
    score: Callable[[Tensor], Tensor],
    time: Tensor,
    outcomes: Tensor,
    *,
    cuts: Iterable[int] | None = None,
    perturb: Callable[[Tensor], Tensor] = lambda y: 1 - y,
    atol: float = 1e-6,
) -> None:
    """Raise AssertionError, naming the rows, where :func:`find_leaks` finds any leak."""
    leaks = find_leaks(score, time, outcomes, cuts=cuts, perturb=perturb, atol=atol)
    if leaks:
        raise AssertionError("; ".join(map(str, leaks)))
