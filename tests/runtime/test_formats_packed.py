"""Files of packed weights: they come back as they were, or not at all."""

from __future__ import annotations

import json
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.runtime.formats.packed import _PREFIX, ALIGNMENT, PackedFile, PackedWriter, packed_path, trim

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
NAMES = st.text(st.characters(codec="utf-8"), max_size=12)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5)


def numbers(*values: int) -> NDArray[np.uint8]:
    return np.array(values, dtype=np.uint8)


def write(path: Path, fill: int = 1) -> Path:
    """A file with a bit of everything."""
    with PackedWriter(path) as writer:
        writer.add("q", {"kind": "int8", "inputs": 3}, np.full(1000, fill, dtype=np.uint8))
        writer.add_tensor("norm", torch.full((7,), float(fill)))
        writer.add("head", {}, np.full(129, fill, dtype=np.uint8))
        assert writer.commit()
    return path


def opened(path: Path) -> PackedFile:
    found = PackedFile.open(path)
    assert found is not None
    return found


@given(
    weights=st.dictionaries(NAMES, st.tuples(st.dictionaries(NAMES, JSON, max_size=3), st.binary(max_size=300))),
    tensors=st.dictionaries(
        NAMES, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans())
    ),
)
@settings(max_examples=60, deadline=None)
def test_what_was_written_comes_back(
    weights: dict[str, tuple[dict[str, Any], bytes]], tensors: dict[str, tuple[torch.dtype, list[int], bool]]
) -> None:
    made = {}
    for name, (dtype, shape, turned) in tensors.items():
        tensor = torch.randint(0, 2, shape).to(dtype)
        made[name] = tensor.T if turned and len(shape) == 2 else tensor  # not dense
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packed" / "x.pack"
        with PackedWriter(path) as writer:
            for name, (description, content) in weights.items():
                writer.add(name, description, np.frombuffer(content, dtype=np.uint8))
            for name, tensor in made.items():
                writer.add_tensor(name, tensor)
            assert writer.commit()
        assert [entry.name for entry in path.parent.iterdir()] == ["x.pack"]
        found = opened(path)
    assert {name: (description, array.tobytes()) for name, (description, array) in found.weights.items()} == weights
    for _, array in found.weights.values():
        assert array.ctypes.data % ALIGNMENT == 0
        assert not array.flags.writeable
    assert found.tensors.keys() == made.keys()
    for name, tensor in made.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_a_tensor_may_be_written_to_and_the_file_does_not_change(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pack")
    opened(path).tensors["norm"].zero_()
    assert opened(path).tensors["norm"].sum() == 7


def test_a_file_cut_short_or_made_longer_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pack")
    whole = path.read_bytes()
    _, _, header, *_ = _PREFIX.unpack_from(whole)
    places = {0, 1, 7, 8, 40, _PREFIX.size - 1, _PREFIX.size, 500, header - 1, header, header + 1, len(whole) - 1}
    for place in places:
        path.write_bytes(whole[:place])
        assert PackedFile.open(path) is None, place
    path.write_bytes(whole + b"\0")
    assert PackedFile.open(path) is None
    path.write_bytes(whole)
    opened(path)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_no_damage_to_prefix_or_header_passes(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "x.pack")
        content = bytearray(path.read_bytes())
        _, _, header, *_ = _PREFIX.unpack_from(content)
        at = data.draw(st.integers(0, _PREFIX.size - 1) | st.integers(header, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        assert PackedFile.open(path) is None


def test_what_is_no_such_file_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert PackedFile.open(tmp_path / "absent.pack") is None
    assert not caplog.records  # the first start of all
    (tmp_path / "other").write_bytes(json.dumps({"not": "ours"}).encode() * 100)
    assert PackedFile.open(tmp_path / "other") is None
    assert PackedFile.open(tmp_path) is None
    assert len(caplog.records) == 2


def test_a_block_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.pack"

    def fail_half_way() -> None:
        with PackedWriter(path) as writer:
            writer.add("q", {}, numbers(1, 2))
            raise KeyError("a checkpoint without some tensor")

    with pytest.raises(KeyError):
        fail_half_way()
    with PackedWriter(path) as writer:
        writer.add("q", {}, numbers(1, 2))
        writer.discard()
        assert not writer.commit()
    assert not list(tmp_path.iterdir())


def test_names_and_arrays_are_checked(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "x.pack") as writer:
        writer.add("q", {}, numbers(1))
        writer.add_tensor("q", torch.zeros(1))  # names of their own
        with pytest.raises(ValueError, match="'q' are there already"):
            writer.add("q", {}, numbers(1))
        with pytest.raises(ValueError, match="tensor 'q' is there already"):
            writer.add_tensor("q", torch.zeros(1))
        with pytest.raises(ValueError, match="'k' are uint8 with 2 axes"):
            writer.add("k", {}, numbers(1, 2).reshape(1, 2))


def test_two_writers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.pack"
    first, second = PackedWriter(path), PackedWriter(path)
    first.add("q", {}, numbers(1, 1))
    second.add("q", {}, numbers(2, 2))
    assert first.commit()
    assert opened(path).weights["q"][1].tolist() == [1, 1]
    assert second.commit()
    assert opened(path).weights["q"][1].tolist() == [2, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pack")
    writers = [threading.Thread(target=lambda fill=fill: [write(path, fill) for _ in range(30)]) for fill in (2, 3)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        found = opened(path)
        values = {*found.weights["q"][1].tolist(), *found.weights["head"][1].tolist(), *found.tensors["norm"].tolist()}
        assert len(values) == 1
        seen |= values
    assert seen <= {1, 2, 3}


@pytest.mark.parametrize("change", [lambda path: write(path, 9), Path.unlink], ids=["replaced", "removed"])
def test_what_is_mapped_stays_when_its_file_goes(tmp_path: Path, change: Callable[[Path], object]) -> None:
    path = write(tmp_path / "x.pack", 1)
    _, array = opened(path).weights["q"]  # the map lives as long as what was taken from it
    change(path)
    assert set(array.tolist()) == {1}


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Writing beyond that many bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [10, 100_000, 200_100])  # at the prefix, in an array, in the header
def test_a_full_disk_costs_the_file_alone(tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.pack"
    with largest_file(limit), PackedWriter(path) as writer:
        writer.add("q", {}, np.ones(200_000, dtype=np.uint8))
        writer.add_tensor("norm", torch.ones(3))
        assert not writer.commit()
    assert not list(tmp_path.iterdir())
    (record,) = caplog.records
    assert "packed weights are not kept" in record.getMessage()


def test_no_file_beyond_the_limit_is_made(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "x.pack", most_bytes=1000) as writer:
        writer.add("q", {}, np.ones(2000, dtype=np.uint8))
        assert not list(tmp_path.iterdir())
        assert not writer.commit()


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with PackedWriter(tmp_path / "file" / "x.pack") as writer:
        writer.add("q", {}, numbers(1))
        assert not writer.commit()
    assert len(caplog.records) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pack")
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        opened(path)
        with PackedWriter(path) as writer:
            writer.add("q", {}, numbers(1))
            assert not writer.commit()
    finally:
        tmp_path.chmod(0o755)
    assert set(opened(path).weights["q"][1].tolist()) == {1}


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.pack") for name in "abcd"]
    for age, path in enumerate(paths):
        os.utime(path, (1000 - age, 1000 - age))
    opened(paths[3])  # the oldest, used now
    trim(tmp_path, most_files=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pack", "b.pack", "d.pack"]
    trim(tmp_path, most_bytes=2 * paths[0].stat().st_size)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pack", "d.pack"]
    trim(tmp_path, most_bytes=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.pack"]


def test_parts_of_writers_that_died_are_removed(tmp_path: Path) -> None:
    dead, alive, other = tmp_path / "a.1.part", tmp_path / "a.2.part", tmp_path / "notes"
    for path in (dead, alive, other):
        path.write_bytes(b"1")
    os.utime(dead, (1000, 1000))
    os.utime(other, (1000, 1000))
    write(tmp_path / "x.pack")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.2.part", "notes", "x.pack"]


def test_the_name_follows_what_the_content_depends_on(tmp_path: Path) -> None:
    code = tmp_path / "core.so"
    code.write_bytes(b"one build")

    def native(isa: str = "avx2", version: str = "1") -> Any:
        core = SimpleNamespace(__file__=str(code))
        return SimpleNamespace(isa=lambda: isa, __version__=version, _core=core)

    first = packed_path(tmp_path, "digest", "int8", native())
    assert first == packed_path(tmp_path, "digest", "int8", native())
    assert first.parent == tmp_path / "packed"
    others = {
        packed_path(tmp_path, "another", "int8", native()),
        packed_path(tmp_path, "digest", "int4", native()),
        packed_path(tmp_path, "digest", "int8", native(isa="avx512")),
        packed_path(tmp_path, "digest", "int8", native(version="2")),
    }
    code.write_bytes(b"another build")
    others.add(packed_path(tmp_path, "digest", "int8", native()))
    assert len(others - {first}) == 5
