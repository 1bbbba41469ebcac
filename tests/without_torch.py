"""Import every module of the rooms that must work on a machine without torch, where importing torch is an error.

Run as a script, in a Python of its own: `python tests/without_torch.py`. Import contracts look at what is written;
this looks at what happens, third-party packages included.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import paceline

ROOMS = ("core", "engine", "text", "cost", "serve", "measure", "route", "simulate", "plan")
ABSENT = ("torch", "transformers")


class Absent(MetaPathFinder):
    """Makes some packages impossible to import, whether they are installed or not."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{fullname} was imported by a room that must work without it", name=fullname)
        return None


def main() -> int:
    sys.meta_path.insert(0, Absent())
    modules = [
        module.name
        for module in pkgutil.walk_packages(paceline.__path__, "paceline.")
        if module.name.split(".")[1] in ROOMS
    ]
    missing = set(ROOMS) - {name.split(".")[1] for name in modules}
    if missing:
        print(f"no modules found in: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    for name in modules:
        import_module(name)
    import_module("paceline.app.cli").make_app()
    print(f"{len(modules)} modules of {', '.join(ROOMS)} imported without {' and '.join(ABSENT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
