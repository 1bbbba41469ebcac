"""Peers in virtual environments of their own: how they are made, where they lie, how they are started.

    ~/.cache/paceline/peers/NAME     the environment, from peers/NAME.txt
    .../llama.cpp/build              its server and the library that its bindings load, from one source

A peer that is not there, or does not start, is reported as absent with the reason.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("llama.cpp", "openvino", "transformers", "vllm")
# transformers is a dependency of ours, and its pinned version is the one that we are tested with.
SHARED = "transformers"
_NO_TEXT = ("torchvision", "torchaudio", "torchcodec")
TCMALLOC = "libtcmalloc_minimal.so.4"
# For this very processor, which is llama.cpp's default.
_OFF = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI", "OPENSSL")
_CMAKE = ["-DCMAKE_BUILD_TYPE=Release", *(f"-DLLAMA_{part}=OFF" for part in _OFF)]


class Absent(Exception):
    """A peer cannot be measured; the message says why."""


@dataclass(frozen=True)
class Peers:
    """Where peers lie."""

    folder: Path

    def home(self, name: str) -> Path:
        """The peer's environment; our own for what we share. Raises Absent."""
        if name in ("paceline", SHARED):
            return Path(sys.prefix)
        home = self.folder / name
        if not (home / "ready").exists():
            raise Absent("not installed; benchmarks/cpu.py --setup-peers installs it")
        return home

    def python(self, name: str) -> str:
        """Its interpreter. Raises Absent."""
        return str(self.home(name) / "bin" / "python")

    def env(self, name: str, threads: int, kv_gib: float) -> dict[str, str]:
        """What its processes find in their environment. Raises Absent."""
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env.pop("OMP_NUM_THREADS", None)  # each is told its threads in its own way
        if name == "llama.cpp":
            env["LLAMA_CPP_LIB_PATH"] = str(self.home(name) / "build" / "bin")
        if name == "vllm":
            env["LD_PRELOAD"] = ":".join(self._preloads())
            env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_gib)))
            env["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
            env["VLLM_DO_NOT_TRACK"] = "1"
            env["VLLM_LOGGING_LEVEL"] = "WARNING"
        return env

    def _preloads(self) -> list[str]:
        """Without AVX-512 vLLM starts only with these two loaded before anything else. Raises Absent."""
        home = self.home("vllm")
        found = [*home.glob(f"**/{TCMALLOC}"), *Path("/usr/lib").glob(f"*/{TCMALLOC}")][:1]
        found += [*home.glob("**/libiomp5.so")][:1]
        if len(found) < 2:
            raise Absent(f"vLLM needs {TCMALLOC} and libiomp5.so; found {', '.join(map(str, found)) or 'neither'}")
        return [str(path) for path in found]

    def set_up(self, names: Sequence[str]) -> int:
        """Install what is not there; the exit code: 1 when one could not be installed."""
        code = 0
        for name in names:
            if name == SHARED or (self.folder / name / "ready").exists():
                print(f"{name}: ready")
                continue
            try:
                self._install(name)
            except (OSError, subprocess.CalledProcessError, Absent) as error:
                print(f"{name}: NOT installed: {error}")
                code = 1
        return code

    def _install(self, name: str) -> None:
        home = self.folder / name
        print(f"{name}: into {home}", flush=True)
        venv.create(home, with_pip=True)
        environ = dict(os.environ)
        if name == "llama.cpp":
            self._build_llama_cpp(home)
            environ["CMAKE_ARGS"] = "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"  # the bindings alone
        wanted = ["-r", str(HERE / "peers" / f"{name}.txt")]
        subprocess.run([home / "bin" / "pip", "install", "-q", *wanted], check=True, env=environ)
        if name == "vllm":
            # Built for another torch than the CPU's, they fail where they are found; text models do without.
            subprocess.run([home / "bin" / "pip", "uninstall", "-q", "-y", *_NO_TEXT], check=True)
            if ctypes.util.find_library("tcmalloc_minimal") is None:
                _fetch_tcmalloc(home)
        (home / "ready").touch()

    def _build_llama_cpp(self, home: Path) -> None:
        """llama-server and its libraries from the source in the sdist of llama-cpp-python."""
        source = home / "source"
        if not source.exists():
            lines = (HERE / "peers" / "llama.cpp.txt").read_text().splitlines()
            pinned = next(line for line in lines if line.startswith("llama-cpp-python"))
            fetched = home / "sdist"
            options = ["-q", "--no-deps", "--no-binary", ":all:", "-d", str(fetched)]
            subprocess.run([home / "bin" / "pip", "download", *options, pinned], check=True)
            with tarfile.open(next(fetched.glob("*.tar.gz"))) as archive:
                archive.extractall(fetched, filter="data")
            next(path for path in fetched.iterdir() if path.is_dir()).rename(source)
        cmake = shutil.which("cmake")
        if cmake is None:
            raise Absent("llama.cpp needs cmake and a C++ compiler")
        build = home / "build"
        subprocess.run([cmake, "-S", source / "vendor" / "llama.cpp", "-B", build, *_CMAKE], check=True)
        subprocess.run([cmake, "--build", build, "--target", "llama-server", "-j", str(os.cpu_count())], check=True)


def _fetch_tcmalloc(home: Path) -> None:
    """Debian's package unpacked into the environment: it needs no root."""
    folder = home / "tcmalloc"
    folder.mkdir(exist_ok=True)
    subprocess.run(["apt-get", "download", "libtcmalloc-minimal4"], cwd=folder, check=True)
    subprocess.run(["dpkg", "-x", str(next(folder.glob("*.deb"))), str(folder)], check=True)
