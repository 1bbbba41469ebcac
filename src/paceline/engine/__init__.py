"""engine: the loop that runs a scheduler over a backend, the process it lives in, and its client.

    loop.py      one iteration: plan, execute, commit; the same in process, in the engine process and in a simulation
    messages.py  what travels between the two processes
    child.py     first instructions of the engine process: signals, and dying with the parent
    server.py    the engine process: takes commands between steps, sends one message a step
    process.py   the parent's hold on one engine process: start, talk, notice its death
    stream.py    what has come for one request and was not read yet
    client.py    EngineClient: submit, stream, cancel, drain, restart

Knows core; no torch, no simulator, no HTTP.
"""
