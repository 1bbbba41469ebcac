"""Parts of `benchmarks/interference.py`.

variants.py    the policies and settings that are measured       scenario.py  what the machine gives, and the promises
bench.py       results kept by key, servers, time limits         loads.py     loads, and who plays them
judge.py       what records say: pure, and tested                figures.py   pictures of stored results
streams.py, capacity.py, burst.py, tenants.py, batch.py, cost.py: one part each, with `planned` (how long), `measure`
and `tell`; quick.py: `--quick`, in process
"""
