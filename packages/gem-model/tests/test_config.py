import subprocess
import sys

import pytest
from gem_model import GemConfig, ModelInputs, Source, Table, TowerConfig, preset
from gem_model.presets import PRESETS

ITEM = Table(name="item", rows=10, dim=8)


def test_configuration_imports_no_torch():
    code = "import sys, gem_model; gem_model.preset('tiny'); gem_model.batch_flops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 30, "heads": 4}, "width 30 is not a multiple of heads 4"),
        ({"width": 12, "heads": 4}, "head dim that is a multiple of 2.*gives 3"),
        ({"attention": "softmx"}, "attention 'softmx' is unknown; did you mean 'softmax'"),
        ({"activation": "gelu_pol"}, "did you mean 'gelu_poly'"),
        ({"rotary": "sideways"}, "unknown.*'position', 'time', 'both'"),
        ({"rotary": "both", "heads": 1}, "at least 2 heads"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"recent": -1}, "recent must be at least 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"interaction_fm": 16, "n_tokens": 16}, "between 1 and n_tokens - 1 = 15, got 16"),
        ({"window": 0}, "window must be at least 1"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"ff_mult": 0.0}, "ff_mult"),
        ({"towers": (TowerConfig(source="a", layers=9),)}, "the tower of 'a' has 9 layers, the model only 2"),
        ({"towers": (TowerConfig(source="a", width=10),)}, "the tower of 'a': width 10 is not a multiple of heads 4"),
        ({"towers": (TowerConfig(source="a"),) * 2}, "towers: 'a' appears twice"),
        ({"experts": ("dcnv2",)}, "expert 'dcnv2' is unknown; did you mean 'dcn'"),
        ({"cross_rank": 0}, "cross_rank must be at least 1"),
        ({"pma_seeds": 8, "pma_queries": 0}, "pma_seeds 8 are pooled into pma_queries tokens"),
    ],
)
def test_config_names_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        GemConfig(**changes)


def test_config_wants_ints():
    with pytest.raises(TypeError, match=r"layers must be an int, got 2.0"):
        GemConfig(layers=2.0)
    with pytest.raises(TypeError, match=r"experts must be a tuple of kinds, got 'dcn'"):
        GemConfig(experts="dcn")


def test_config_is_frozen_and_keyword_only():
    with pytest.raises(TypeError):
        GemConfig(64)
    with pytest.raises(AttributeError):
        GemConfig().width = 3


def inputs(**changes):
    fields = {
        "tables": (ITEM,),
        "sources": (Source(name="events", ids=(("item", "item"),)),),
        "sparse": (("item", "item"),),
        "tasks": ("click",),
    }
    return ModelInputs(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse": (("item", "itm"),)}, "'item' asks for table 'itm', which is unknown; did you mean 'item'"),
        ({"sources": (Source(name="e", ids=(("a", "b"),)),)}, "'e.a' asks for table 'b'"),
        ({"tables": (ITEM, ITEM)}, "tables: 'item' appears twice"),
        ({"tables": (ITEM, Table(name="x", rows=2, dim=8))}, "uses table 'x'"),
        (
            {"tables": (ITEM, Table(name="x", rows=2, dim=4)), "sparse": (("item", "item"), ("x", "x"))},
            "one dim.*'x': 4",
        ),
        ({"tasks": ()}, "at least one binary label"),
        ({"tasks": ("",)}, "task is empty"),
        ({"sparse": ()}, "no sparse and no dense"),
    ],
)
def test_inputs_name_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        inputs(**changes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table(name="", rows=1, dim=1),
        lambda: Table(name="a", rows=0, dim=1),
        lambda: Source(name="e", ids=()),
        lambda: TowerConfig(source="e", width=0),
        lambda: Source(name="e", ids=(("a", "t"),), floats=(("a", 1),)),
    ],
)
def test_tables_and_sources_are_checked(make):
    with pytest.raises(ValueError):
        make()


def test_candidate_columns_prefer_the_same_name():
    source = Source(name="e", ids=(("previous", "item"), ("item", "item"), ("action", "act")))
    offered = ModelInputs(
        tables=(ITEM, Table(name="act", rows=3, dim=8)), sources=(source,), sparse=(("item", "item"),), tasks=("y",)
    )
    assert offered.candidate_columns(source) == (("item", "item"),)
    renamed = ModelInputs(
        tables=offered.tables, sources=(source,), sparse=(("ad", "item"), ("item", "item")), tasks=("y",)
    )
    assert renamed.candidate_columns(source) == (("previous", "ad"), ("item", "item"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name):
    assert preset(name, dropout=0.3).dropout == 0.3


def test_preset_hints():
    with pytest.raises(ValueError, match="did you mean 'small'"):
        preset("smal")
    with pytest.raises(ValueError, match="did you mean 'width'"):
        preset("tiny", widht=3)
