from __future__ import annotations

import pytest
from gem_parallel import Tier, Topology


def cluster() -> Topology:
    return Topology(
        device="H200",
        device_memory=150_000_000_000,
        memory_gbps=4800.0,
        host_memory=2_000_000_000_000,
        tiers=(
            Tier(name="nvlink", size=8, bandwidth_gbps=450.0, latency_us=3.0),
            Tier(name="network", size=64, bandwidth_gbps=50.0, latency_us=10.5),
        ),
        notes=('a "quoted" note \\ with a slash',),
    )


def test_toml_round_trip(tmp_path):
    cluster().to_toml(tmp_path / "t.toml")
    again = Topology.from_toml(tmp_path / "t.toml")
    assert again == cluster()
    assert again.notes == cluster().notes


def test_toml_with_an_unknown_key_names_the_file(tmp_path):
    cluster().to_toml(tmp_path / "t.toml")
    text = (tmp_path / "t.toml").read_text().replace("latency_us", "latency_ms")
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(ValueError, match=r"t\.toml.*latency_ms"):
        Topology.from_toml(tmp_path / "t.toml")


def test_detect_reads_this_machine():
    topology = Topology.detect("cpu")
    assert topology.device_memory == 0
    assert topology.host_memory > 1 << 28
    assert topology.tiers[0].size >= 1


def test_why_is_a_table():
    text = cluster().why()
    assert "nvlink" in text
    assert "450" in text
    assert "quoted" in text


def test_tiers_must_nest():
    with pytest.raises(ValueError, match="'network' of 12"):
        Topology(
            device="x",
            device_memory=0,
            memory_gbps=1.0,
            host_memory=1,
            tiers=(
                Tier(name="nvlink", size=8, bandwidth_gbps=1, latency_us=1),
                Tier(name="network", size=12, bandwidth_gbps=1, latency_us=1),
            ),
        )


@pytest.mark.parametrize("change", [{"size": 0}, {"bandwidth_gbps": 0.0}, {"latency_us": -1.0}])
def test_a_tier_must_be_possible(change):
    with pytest.raises(ValueError, match="Tier 'x'"):
        Tier(**{"name": "x", "size": 1, "bandwidth_gbps": 1.0, "latency_us": 1.0, **change})
