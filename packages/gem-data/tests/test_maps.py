"""What the system is told about the maps of a log, and reading ahead."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gem_data.log.maps
import numpy as np
import pytest
from gem_data import EventLog, Loader, LoaderConfig, build_log, from_table, prepare
from gem_data.log.maps import Maps, Watched, available_memory, read_ahead
from gem_data.testing import small_events, small_schema


def scattered_maps(folder: Path) -> dict[str, bool]:
    """Of each mapped file in a folder, whether the kernel was told that it is read at random ("rr")."""
    found, name = {}, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) > 5 else ""
        elif line.startswith("VmFlags:") and name.startswith(str(folder)):
            found[Path(name).name] = " rr" in line
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
@pytest.mark.parametrize("parts", [False, True])
def test_shuffled_loaders_read_scattered_and_others_in_order(tmp_path, parts):
    folder = tmp_path.resolve() / "log"
    if parts:
        prepare(from_table(small_events(200), small_schema()), folder, part_rows=60)
    else:
        build_log(small_events(200), small_schema(), folder)
    log = EventLog.open(folder)
    options = LoaderConfig(batch_size=50, max_history=5)
    shuffled = Loader(log, range(200 if not parts else len(log)), options)
    ordered = Loader(log, range(100), LoaderConfig(batch_size=50, max_history=5, shuffle=False))
    for loader, expected in ((shuffled, True), (ordered, False), (shuffled, True)):
        batch = loader.batch(0, 0)
        batch.dense.sum()
        maps = scattered_maps(folder)
        assert len(maps) >= (4 if parts else 1)
        assert set(maps.values()) == {expected}


def test_a_shuffled_epoch_reads_ahead_once_and_after_its_first_batch(tmp_path, monkeypatch):
    build_log(small_events(120), small_schema(), tmp_path / "log")
    calls = []
    monkeypatch.setattr("gem_data.log.event_log.read_ahead", lambda files: calls.append([f.path.name for f in files]))
    for shuffle, expected in ((False, 0), (True, 1)):
        log = EventLog.open(tmp_path / "log")
        loader = Loader(log, range(120), LoaderConfig(batch_size=40, max_history=5, shuffle=shuffle))
        for _ in range(2):
            for _ in loader:
                if loader.epoch == 0 and loader.step == 1:
                    assert calls == []
        assert len(calls) == expected
    assert "events.arrow" in calls[0]


def test_files_are_read_whole_unless_they_are_too_large(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(gem_data.log.maps, "BLOCK", 1000)
    for name, size in (("a", 2500), ("b", 0), ("c", 999)):
        (tmp_path / name).write_bytes(b"x" * size)
    files = [Watched(tmp_path / n) for n in "abc"]
    (tmp_path / "b").unlink()  # one that is gone is passed over
    real = Path.open

    def watched(self, *arguments, **options):
        read.append(self.name)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", watched)
    thread = read_ahead(files)
    thread.join(10)
    assert not thread.is_alive()
    assert read[-3:] == ["a", "b", "c"]
    monkeypatch.setattr(gem_data.log.maps, "available_memory", lambda: 2 * 3498)
    assert read_ahead(files) is None
    monkeypatch.setattr(gem_data.log.maps, "available_memory", lambda: 2 * 3499)
    assert read_ahead(files) is not None


def test_memory_is_told_and_arrays_are_mapped(tmp_path):
    assert 1 << 26 < available_memory() < 1 << 46
    np.save(tmp_path / "a.npy", np.arange(9))
    np.save(tmp_path / "empty.npy", np.arange(0))
    maps = Maps()
    values = maps.array(tmp_path / "a.npy")
    assert values.tolist() == list(range(9))
    assert not values.flags.writeable
    assert maps.array(tmp_path / "empty.npy").tolist() == []
    maps.advise(scattered=True)
    (tmp_path / "nothing").touch()
    with pytest.raises(ValueError, match="empty"):
        maps.file(tmp_path / "nothing")
