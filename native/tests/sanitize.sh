#!/usr/bin/env bash
# Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer and runs their tests under both; and the thread
# pool with ThreadSanitizer.
# usage: native/tests/sanitize.sh [pytest options]. Needs g++, cmake, and a Python with nanobind, numpy and pytest.
set -euo pipefail
native=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$native/../.venv/bin/python}
[[ -x $python ]] || python=python3
build=$native/build/sanitize

mkdir -p "$build/paceline_native"
cmake -S "$native" -B "$build" -DPACELINE_SANITIZE=ON -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" >/dev/null
cmake --build "$build" -j "${JOBS:-1}"
cp "$native"/paceline_native/*.py "$build"/_core*.so "$build/paceline_native/"

g++ -std=c++17 -O1 -g -fsanitize=thread "$native/tests/pool_races.cpp" "$native/src/pool.cpp" -o "$build/pool_races" -pthread
"$build/pool_races"

# The interpreter itself is not sanitized: the runtime is loaded before it, and its own leaks are not ours.
runtime=$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libstdc++.so)
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export OMP_NUM_THREADS=1 PYTHONMALLOC=malloc PYTHONPATH=$build
LD_PRELOAD=$runtime "$python" -m pytest -q -c "$native/tests/pytest.ini" "$native/tests" "$@"
