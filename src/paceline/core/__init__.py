"""core: what is decided each iteration, and nothing about how it is computed.

Requests and their counters, step plans and results, the scheduler, its policies (one file each), KV block
accounting and the prefix index. Standard library only; no clock, no randomness, no tensor of its own: time and
seeds are arguments, so the same calls give the same plans in a server, a test and a simulation.
"""
