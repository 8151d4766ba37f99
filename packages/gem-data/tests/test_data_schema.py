from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from gem_data import Column, Counter, Schema, Task
from gem_data.sources import movielens, synthetic
from gem_data.testing import small_schema

USER = Column(name="user", kind="id", role="user", cardinality=5)
ACTION = Column(name="action", kind="id", role="outcome", cardinality=3)
CLICK = Task(name="click", column="action", minimum=2)


@pytest.mark.parametrize("schema", [small_schema(), movielens.schema(), synthetic.schema(9)], ids=lambda s: s.name)
def test_json_round_trip_keeps_the_fingerprint(schema):
    again = Schema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    assert again.fingerprint() == schema.fingerprint()
    assert again.differences(schema) == []


def test_every_declaration_is_part_of_the_fingerprint():
    schema = small_schema()
    changed = [
        dataclasses.replace(schema, name="other"),
        dataclasses.replace(schema, columns=schema.columns[::-1]),
        dataclasses.replace(schema, tasks=(*schema.tasks[:2], dataclasses.replace(schema.tasks[2], minimum=0.4))),
        dataclasses.replace(
            schema, counters=(dataclasses.replace(schema.counters[0], prior=11.0), *schema.counters[1:])
        ),
        small_schema(items=8),
    ]
    prints = {s.fingerprint() for s in [schema, *changed]}
    assert len(prints) == len(changed) + 1
    assert all(schema.differences(other) for other in changed)


def test_the_fingerprint_does_not_change_between_versions():
    schema = Schema(name="pinned", columns=(USER, ACTION), tasks=(CLICK,))
    assert schema.fingerprint() == "0f9f46936f1c4dfb"


def test_require_names_both_fingerprints_and_the_difference():
    here, there = small_schema(), small_schema(items=9)
    with pytest.raises(ValueError) as error:
        here.require(there, "the log")
    text = str(error.value)
    assert here.fingerprint() in text
    assert there.fingerprint() in text
    assert "column 'item': cardinality 7 here, 9 there" in text
    here.require(small_schema(), "the log")


def test_what_a_batch_is_made_of():
    schema = small_schema()
    assert schema.sequence_ids == ("item", "action")
    assert schema.sequence_floats == {"price": 1, "genres": 3, "watched": 1}
    assert schema.sparse == ("user", "item")
    assert schema.dense_columns == {"age": 1, "price": 1, "genres": 3}
    assert schema.dense_names[:5] == ("age", "price", "genres[0]", "genres[1]", "genres[2]")
    assert len(schema.dense_names) == schema.dense_width == 5 + len(schema.counters)
    assert schema.tables == {"user": 6, "item": 7, "action": 4}


def test_an_unknown_column_gets_the_closest_name():
    with pytest.raises(ValueError, match="unknown column 'itme'; did you mean 'item'"):
        small_schema().column("itme")
    with pytest.raises(ValueError, match="unknown column 'actoin'; did you mean 'action'"):
        Schema(name="s", columns=(USER, ACTION), tasks=(Task(name="t", column="actoin", equals=1),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Column(name="x", kind="idd", role="user", cardinality=2), "did you mean 'id'"),
        (lambda: Column(name="x", kind="id", role="contxt", cardinality=2), "did you mean 'context'"),
        (lambda: Column(name="x", kind="id", role="user"), "needs cardinality >= 1, not None"),
        (lambda: Column(name="x", kind="vector", role="user", size=0), "needs size >= 1, not 0"),
        (lambda: Column(name="x", kind="float", role="user", size=2), "takes no size"),
        (lambda: Column(name="time", kind="float", role="user"), "in every log"),
        (lambda: Column(name="_x", kind="float", role="user"), "identifier"),
        (lambda: Task(name="t", column="x"), "either minimum or equals, not neither"),
        (lambda: Task(name="t", column="x", minimum=1, equals=1), "not both"),
        (lambda: Counter(name="c", kind="rate", key="item"), "needs task"),
        (lambda: Counter(name="c", kind="count", key="item", over="genres"), "takes no over"),
        (lambda: Counter(name="c", kind="count", key="item", prior=0), "prior > 0"),
        (lambda: Schema(name="s", columns=(USER, ACTION, ACTION), tasks=(CLICK,)), "'action' more than once"),
        (lambda: Schema(name="s", columns=(USER, ACTION), tasks=(CLICK,), user="action"), "role 'user'"),
        (lambda: Schema(name="s", columns=(USER, ACTION), tasks=()), "at least one task"),
        (lambda: Schema(name="s", columns=(USER,), tasks=(Task(name="t", column="user", equals=1),)), "role 'outcome'"),
        (
            lambda: Schema(
                name="s",
                columns=(USER, ACTION),
                tasks=(CLICK,),
                counters=(Counter(name="c", kind="count", key="action"),),
            ),
            "an outcome would leak",
        ),
        (
            lambda: Schema(
                name="s",
                columns=(USER, ACTION),
                tasks=(CLICK,),
                counters=(Counter(name="c", kind="residual", key="user", task="click", against="d"),),
            ),
            "unknown earlier rate counter 'd'",
        ),
        (lambda: Schema.from_dict({**small_schema().to_dict(), "colums": []}), "did you mean 'columns'"),
    ],
)
def test_wrong_declarations_say_what_was_expected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_task_rules():
    values = np.array([0.0, 1.0, 2.0, 3.0])
    assert Task(name="t", column="x", minimum=2).positive(values).tolist() == [False, False, True, True]
    assert Task(name="t", column="x", equals=2).positive(values).tolist() == [False, False, True, False]
