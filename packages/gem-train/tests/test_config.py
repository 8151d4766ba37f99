"""Configuration: round trips, overrides, and refusals that name the path, the value and what was expected."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from typing import Literal

import pytest
from gem_train import recipes
from gem_train.config import RunConfig, differences, from_dict, from_toml, leaves, override, to_dict, to_toml
from gem_train.errors import UserError
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class Leaf:
    rate: float = 0.1
    mode: Literal["fast", "slow"] = "fast"
    names: tuple[str, ...] = ()

    def __post_init__(self):
        if self.rate < 0:
            raise ValueError(f"rate is {self.rate}; expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Top:
    count: int = 1
    on: bool = False
    limit: int | None = None
    capped: float | None = 1.0
    pair: tuple[float, float] = (0.0, 1.0)
    label: str | None = None
    either: int | str = 3
    leaf: Leaf = field(default_factory=Leaf)
    by_name: dict[str, Leaf] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8).filter(lambda s: s != "none")
key = st.text("abcXYZ_", min_size=1, max_size=5)
finite = st.floats(allow_nan=False, allow_infinity=False, min_value=0)
leaf_values = st.builds(
    Leaf, rate=finite, mode=st.sampled_from(["fast", "slow"]), names=st.lists(text, max_size=3).map(tuple)
)
tops = st.builds(
    Top,
    count=st.integers(-(2**40), 2**40),
    on=st.booleans(),
    limit=st.none() | st.integers(-9, 9),
    capped=st.none() | finite,
    pair=st.tuples(finite, finite),
    label=st.none() | text,
    either=st.integers() | text,
    leaf=leaf_values,
    by_name=st.dictionaries(key, leaf_values, max_size=2),
    sizes=st.dictionaries(key, st.integers(0, 9), max_size=2),
)


@settings(max_examples=100, deadline=None)
@given(tops)
def test_toml_round_trip(config):
    assert from_toml(Top, to_toml(config)) == config


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_survive_the_round_trip(name, tmp_path):
    config = recipes.load(name)
    assert config.recipe == name
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert from_toml(RunConfig, file) == config


def test_none_that_is_not_the_default_is_written_and_read():
    written = to_toml(Top(capped=None))
    assert tomllib.loads(written)["capped"] == "none"
    assert from_toml(Top, written).capped is None


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("count=7", "count", 7),
        ("count=1_000", "count", 1000),
        ("on=true", "on", True),
        ("on=False", "on", False),
        ("limit=4", "limit", 4),
        ("capped=none", "capped", None),
        ("capped=2", "capped", 2.0),
        ("pair=0.5,2", "pair", (0.5, 2.0)),
        ("pair=[1, 2.5]", "pair", (1.0, 2.5)),
        ("label=x=y", "label", "x=y"),
        ("either=5", "either", 5),
        ("either=five", "either", "five"),
        ("leaf.rate=1e-3", "leaf.rate", 1e-3),
        ("leaf.mode=slow", "leaf.mode", "slow"),
        ("leaf.names=a, b", "leaf.names", ("a", "b")),
        ("leaf.names=", "leaf.names", ()),
        ('leaf.names=["a,b"]', "leaf.names", ("a,b",)),
    ],
)
def test_overrides_are_read_as_their_field_wants(assignment, path, value):
    found = override(Top(), [assignment])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_dictionaries_can_be_overridden_whole_or_by_key():
    config = override(Top(), ["sizes={a = 1}", "sizes.b=2", "by_name.x={rate = 0.5}"])
    assert config.sizes == {"a": 1, "b": 2}
    assert config.by_name == {"x": Leaf(rate=0.5)}
    again = override(config, ["by_name.x.mode=slow", "sizes.a=9"])
    assert again.by_name == {"x": Leaf(rate=0.5, mode="slow")}
    assert again.sizes == {"a": 9, "b": 2}


def test_later_overrides_win_and_the_original_is_untouched():
    before = Top()
    assert override(before, ["count=2", "count=3"]).count == 3
    assert before == Top()


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("count=1.5", ["count", "'1.5'", "whole number"]),
        ("count=true", ["count", "'true'", "whole number"]),
        ("on=yes", ["on", "'yes'", "true or false"]),
        ("limit=many", ["limit", "'many'", "whole number or none"]),
        ("leaf.rate=fast", ["leaf.rate", "'fast'", "a number"]),
        ("leaf.mode=fsat", ["leaf.mode", "'fsat'", "'fast', 'slow'", "did you mean 'fast'"]),
        ("pair=1,2,3", ["pair", "2 elements"]),
        ("pair=1,x", ["pair[1]", "'x'", "a number"]),
        ("leaf=3", ["leaf", "a table with the keys rate, mode, names"]),
        ("leaf.rate=-1", ["leaf", "rate is -1.0", "0 or more"]),
        ("cuont=1", ["'cuont'", "did you mean 'count'"]),
        ("rate=1", ["'rate'", "did you mean 'leaf.rate'"]),
        ("leaf.rat=1", ["'leaf.rat'", "did you mean 'leaf.rate'"]),
        ("count.x=1", ["'count.x'", "no keys of its own"]),
        ("zzz=1", ["'zzz'", "expected one of"]),
        ("count", ["'count'", "path.to.key=value"]),
    ],
)
def test_refusals_say_where_what_and_why(assignment, says):
    with pytest.raises(UserError) as caught:
        override(Top(), [assignment])
    for part in says:
        assert part in str(caught.value)


def test_unknown_keys_in_a_file_are_refused_with_a_suggestion():
    with pytest.raises(UserError, match=r"optim\.warmup_stesp.*did you mean 'warmup_steps'"):
        from_dict(RunConfig, {"optim": {"warmup_stesp": 3}})


def test_a_bool_is_no_number_and_an_int_is_a_float():
    with pytest.raises(UserError, match="count"):
        from_dict(Top, {"count": True})
    assert from_dict(Top, {"capped": 3}).capped == 3.0
    assert isinstance(from_dict(Top, {"capped": 3}).capped, float)


def test_a_missing_field_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Needy:
        path: str

    Needy.__annotations__["path"] = str  # local classes resolve no strings
    with pytest.raises(UserError, match="path is missing; expected text"):
        from_dict(Needy, {})


def test_bad_files_are_reported(tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text("[data\n")
    with pytest.raises(UserError, match=r"broken\.toml: not valid TOML"):
        from_toml(RunConfig, file)
    with pytest.raises(UserError, match="cannot read the configuration"):
        from_toml(RunConfig, tmp_path / "absent.toml")


def test_differences_name_paths():
    a, b = Top(sizes={"a": 1}), Top(count=2, leaf=Leaf(rate=0.3), sizes={"b": 1})
    assert differences(a, b) == [
        "count: 1 -> 2",
        "leaf.rate: 0.1 -> 0.3",
        "sizes.a: 1 -> None",
        "sizes.b: None -> 1",
    ]
    assert differences(a, a) == []


def test_leaves_cover_every_setting():
    paths = leaves(RunConfig)
    for path in ("optim.lr", "data.synthetic.events", "model.width", "parallel.table_sharding", "train.seed"):
        assert path in paths


def test_every_setting_of_a_run_can_be_overridden_with_its_own_value():
    """What `show` prints can be given to --set, path by path."""
    config = recipes.load("ml100k")

    def assignments(tree, path=""):
        for name, value in tree.items():
            here = f"{path}{name}"
            if isinstance(value, dict):
                yield from assignments(value, f"{here}.")
            else:
                yield f"{here}={text(value)}"

    def text(value):
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list) and value and isinstance(value[0], dict):  # tables, as TOML writes them in a line
            return "[" + ", ".join("{" + ", ".join(f"{k} = {v!r}" for k, v in t.items()) + "}" for t in value) + "]"
        return value

    assert override(config, list(assignments(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("data.batch_size=0", "batch_size is 0"),
        ("data.source=log", "path is None"),
        ("optim.final_ratio=2", "final_ratio is 2.0"),
        ("optim.lr=-1", "lr is -1.0"),
        ("optim.clip_norm=0", "clip_norm is 0.0"),
        ("train.max_steps=0", "max_steps is 0"),
        ("model.heads=5", "heads 5"),
        ("parallel.table_sharding=diagonal", "diagonal"),
    ],
)
def test_values_out_of_range_are_refused(assignment, says):
    with pytest.raises(UserError, match=says):
        override(recipes.load("synthetic"), [assignment])


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().train.seed = 3
