"""The real backend: turns a step plan into tensors, runs a model over them, and answers with a step result.

A plan arrives in `backend`, which keeps each request's tokens and block table, builds one `batch.RaggedBatch` of all
rows (prefill chunks and decodes together) and calls a model once. Models (`models`) are written with `layers` and
`kernels`; each imports only what comes before it. `load` finds and reads a checkpoint, `sampling` picks the tokens.

Everything is plain torch on whichever device is named. Host-side bookkeeping is numpy in preallocated buffers, so that
a step of 64 decodes spends its time in the model.
"""
