"""Routers, one file each. `registry.py` knows them by name; `docs/routing.md` compares them."""
