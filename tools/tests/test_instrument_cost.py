"""What instruments cost a step: nineteen plain steps and one that is looked at, in each round."""

import instrument_cost
import pytest


def rounds(*three: tuple[float, float, float]) -> instrument_cost.Rounds:
    found = instrument_cost.Rounds()
    for i, seconds in enumerate(three):
        for kind, clock in zip(instrument_cost.KINDS, seconds, strict=True):
            found.add(kind, clock, 0.5, {"without": 0.0, "with": 0.001, "looked at": 0.021 + 0.001 * i}[kind])
    return found


def test_a_card_is_judged_by_its_clock():
    slow = rounds((1.0, 1.02, 1.02), (1.0, 1.03, 1.13), (1.0, 1.04, 1.04)).result(cuda=True)
    assert slow["clock_shares"] == pytest.approx([0.02, 0.035, 0.04])
    assert slow["clock_share"] == pytest.approx(0.035)
    assert slow["inside_share"] == pytest.approx((19 * 0.001 + 0.022) / 20 / 1.0)
    assert not slow["ok"]
    fast = rounds((1.0, 1.001, 1.02), (1.1, 1.1, 1.1), (1.0, 1.002, 1.002)).result(cuda=True)
    assert fast["ok"]
    assert "less than 1% of a step: yes" in instrument_cost.render(fast)


def test_a_cpu_that_others_use_is_judged_by_its_processor_time():
    found = rounds((1.0, 1.2, 1.2), (1.0, 1.2, 1.2)).result(cuda=False)
    assert found["inside_share"] == pytest.approx((19 * 0.001 + 0.0215) / 20 / 0.5)
    assert found["ok"]


def test_only_the_outermost_call_counts_and_none_is_made_without():
    class Watched:
        calls = 0

        def outer(self) -> str:
            self.inner()
            return "made"

        def inner(self) -> None:
            Watched.calls += sum(1 for _ in range(20_000)) > 0

    meter = instrument_cost.Meter()
    meter.watch(Watched, "outer", lambda: "left out")
    meter.watch(Watched, "inner", lambda: None)
    assert Watched().outer() == "left out"
    assert (meter.seconds, Watched.calls) == (0.0, 0)
    meter.kind = "with"
    assert Watched().outer() == "made"
    assert Watched.calls == 1
    assert meter.seconds > 0
