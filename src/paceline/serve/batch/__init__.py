"""Offline batch: files of requests that are answered when there is room, as class `batch`.

    lines.py      a file of requests: checked once, then read line by line
    ledger.py     the answers on disk, append-only: what is there is done, whatever ended the process
    runner.py     one line, by the code path of an HTTP request; patient with an engine that is busy or dies
    crew.py       many lines at once, tenants in turn
    store.py      files and batches of tenants, on disk
    manager.py    the life of a batch, from `validating` to its end
    endpoints.py  /v1/files and /v1/batches; upload.py: bodies in, under limits

`paceline batch` uses the first four without a server; so does a server, with the rest around them.
"""
