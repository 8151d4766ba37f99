"""The leak self-test finds what it should, and neither GEM nor a baseline leaks when histories are strictly earlier."""

import dataclasses
import itertools

import pytest
import torch
from gem_model import GEM, ModelInputs, Source, Table, preset
from gem_model.baselines import TRAINED, build
from gem_model.leaks import Leak, assert_no_leak, find_leaks
from gem_model.testing import RandomBatch, RandomIds, RandomSequence

ROWS, USERS, ITEMS = 90, 5, 12
INPUTS = ModelInputs(
    tables=(Table(name="item", rows=ITEMS, dim=8), Table(name="rating", rows=2, dim=8)),
    sources=(Source(name="events", ids=(("item", "item"), ("rating", "rating")), max_len=ROWS),),
    sparse=(("item", "item"),),
    dense=2,
    tasks=("like",),
)
G = torch.Generator().manual_seed(0)
USER = torch.randint(0, USERS, (ROWS,), generator=G)
ITEM = torch.randint(0, ITEMS, (ROWS,), generator=G)
TIME = torch.randint(0, 25, (ROWS,), generator=G).sort().values * 600  # many rows share (user, time)
OUTCOMES = torch.randint(0, 2, (ROWS,), generator=G)


def batch_of(outcomes, leak="none"):
    """All rows as one batch; ``dense`` is what was known of the item: how often it came before, its mean outcome."""
    earlier = (TIME[None] < TIME[:, None]) if leak != "ties" else (TIME[None] <= TIME[:, None])
    earlier &= torch.eye(ROWS) == 0
    mine = earlier & (USER[None] == USER[:, None])
    events = mine.nonzero()[:, 1]
    of_item = (ITEM[None] == ITEM[:, None]) & (earlier if leak != "means" else torch.ones(ROWS, ROWS).bool())
    count = of_item.sum(1).float()
    mean = (of_item * outcomes[None]).sum(1) / count.clamp(min=1)
    item = (ITEM + outcomes) % ITEMS if leak == "own" else ITEM
    return RandomBatch(
        sequences={
            "events": RandomSequence(
                ids={"item": ITEM[events], "rating": outcomes[events]},
                floats={},
                time=TIME[events],
                offsets=torch.cat((torch.zeros(1, dtype=torch.int64), mine.sum(1).cumsum(0))),
                max_len=ROWS,
            )
        },
        sparse={"item": RandomIds(values=item, offsets=torch.arange(ROWS + 1))},
        dense=torch.stack((count, mean), dim=1),
        time=TIME,
        labels=outcomes[:, None].float(),
        label_mask=torch.ones(ROWS, 1, dtype=torch.bool),
        weights=torch.ones(ROWS),
    )


def scorer(model, leak="none"):
    model.eval()

    @torch.no_grad()
    def score(outcomes):
        return model(batch_of(outcomes, leak))

    return score


GEMS = {
    "gem": {"layers": 2},
    "gem, gdpa, experts, seeds": {"attention": "gdpa", "experts": ("wukong", "attention"), "pma_seeds": 4},
}


@pytest.mark.parametrize("name", [*GEMS, *TRAINED])
def test_no_model_leaks(name):
    torch.manual_seed(0)
    model = GEM(preset("tiny", **GEMS[name]), INPUTS) if name in GEMS else build(name, {}, INPUTS)
    for parameter in model.parameters():  # what starts at zero, such as the wide part, would hide its inputs
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert_no_leak(scorer(model), TIME, OUTCOMES)


@pytest.mark.parametrize("leak", ["ties", "means", "own"])
def test_leaks_are_found(leak):
    torch.manual_seed(0)
    model = build("dlrm", {}, INPUTS)
    leaks = find_leaks(scorer(model, leak), TIME, OUTCOMES)
    assert leaks
    assert all((TIME[found.rows] <= found.cut).all() for found in leaks)
    with pytest.raises(AssertionError, match="moved with outcomes at or after it"):
        assert_no_leak(scorer(model, leak), TIME, OUTCOMES)


def test_exactly_the_leaking_rows_are_named():
    """A score that reads the next row's outcome: at a cut, only the row just before may know too much."""
    time = torch.tensor([10, 20, 30, 30, 40])
    outcomes = torch.tensor([0, 1, 1, 0, 1])
    (leak,) = find_leaks(lambda y: y.roll(-1).double() * torch.tensor([1.0, 2, 3, 4, 0]), time, outcomes, cuts=[30])
    assert isinstance(leak, Leak)
    assert leak.rows.tolist() == [1, 2, 3]  # row 1 reads row 2, which is at the cut
    assert leak.largest == 4.0
    assert str(leak).startswith("3 scores at or before 30 moved")
    causal = lambda y: y.cumsum(0).double() - y  # noqa: E731
    (tie,) = find_leaks(causal, time, outcomes, cuts=[30])
    assert tie.rows.tolist() == [3]  # it counts row 2, of the same time
    assert find_leaks(causal, torch.arange(5), outcomes, cuts=[1, 2, 3]) == []


def test_a_test_that_cannot_fail_is_refused():
    time, outcomes = torch.arange(6), torch.tensor([0, 1, 0, 1, 1, 0])
    with pytest.raises(ValueError, match="says nothing"):
        find_leaks(lambda y: torch.zeros(6), time, outcomes)
    with pytest.raises(ValueError, match="not deterministic"):
        find_leaks(lambda y: torch.rand(6), time, outcomes)
    with pytest.raises(ValueError, match="leaves some of the 3 outcomes at or after 3"):
        find_leaks(lambda y: y.double(), time, outcomes, cuts=[3], perturb=lambda y: y)
    with pytest.raises(ValueError, match="not finite"):
        find_leaks(lambda y: y / torch.zeros(6), time, outcomes)


def test_logs_of_gem_data_do_not_leak(tmp_path):
    """The real way from events to scores: the log is built anew of other outcomes, with its streaming counters."""
    gem_data = pytest.importorskip("gem_data")
    pa = pytest.importorskip("pyarrow")
    from gem_data.testing import small_events, small_schema

    schema = small_schema()
    counters = tuple(dataclasses.replace(c, in_history=True) for c in schema.counters)
    schema = dataclasses.replace(schema, counters=counters)  # seen by the history's events, too
    table = small_events(80).sort_by([("user", "ascending"), ("time", "ascending")])  # the order of a log's rows
    time = torch.tensor(table["time"].to_pylist())
    actions = torch.tensor(table["action"].to_pylist())
    versions = itertools.count()

    def batch(actions):
        place = table.column_names.index("action")
        folder = tmp_path / str(next(versions))
        gem_data.build_log(table.set_column(place, "action", pa.array(actions.numpy())), schema, folder)
        return gem_data.Collator(gem_data.EventLog.open(folder), max_history=20)(list(range(len(time))))

    assert torch.equal(batch(actions).time, time)
    inputs = ModelInputs(
        tables=tuple(Table(name=name, rows=rows, dim=8) for name, rows in schema.tables.items()),
        sources=(
            Source(
                name=schema.source,
                ids=tuple((name, name) for name in schema.sequence_ids),
                floats=(*schema.sequence_floats.items(), *((name, 1) for name in schema.history_counters)),
                max_len=20,
            ),
        ),
        sparse=tuple((name, name) for name in schema.sparse),
        dense=schema.dense_width,
        dense_columns=tuple(schema.dense_columns.items()),
        tasks=schema.task_names,
    )
    torch.manual_seed(0)
    model = GEM(preset("tiny", evidence_heads=3), inputs).eval()
    torch.nn.init.normal_(model.heads.wide.weight)  # so that the counters count from the start
    with torch.no_grad():
        assert_no_leak(lambda a: model(batch(a)), time, actions, perturb=lambda a: a % 3 + 1)
        with pytest.raises(AssertionError, match="moved"):  # the rate of the whole log, which only its end knows
            assert_no_leak(
                lambda a: model(batch(a)) + (a == 3).float().mean(), time, actions, perturb=lambda a: a % 3 + 1
            )
