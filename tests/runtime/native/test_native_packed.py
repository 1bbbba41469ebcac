"""Packed weights that were mapped from a file compute what those that were packed just now do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.runtime.formats.packed import PackedFile, PackedWriter, packed_path
from paceline.runtime.kernels.native import native


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_map_from_a_file_gives_the_same_bits(tmp_path: Path, kind: str, gated: bool) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(62, 70), torch.randn(62), torch.randn(5, 70)
    packed = native().pack(weight, kind, bias=bias, gated=gated)
    want = torch.empty(5, packed.out_features)
    packed(x, want, "silu")

    path = packed_path(tmp_path, "digest", kind, native())
    with PackedWriter(path) as writer:
        writer.add("up", packed.description, packed.buffer())
        assert writer.commit()
    file = PackedFile.open(path)
    assert file is not None
    restored = native().restore(*file.weights["up"])
    del file
    path.unlink()  # the map holds on to it
    found = torch.empty_like(want)
    restored(x, found, "silu")
    assert torch.equal(found, want)
