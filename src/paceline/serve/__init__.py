"""serve: the OpenAI-compatible HTTP border.

    server.py       listens, starts the engine, drains on signals
    app.py          the table of endpoints and the middleware around them
    middleware.py   request ids, the access log, keys and limits
    schemas.py      what a body may hold; fields.py: what we know and cannot honour
    prepare.py      a checked body becomes engine requests, one for each choice (conversation.py: messages to a prompt)
    generation.py   runs them and merges what comes back
    chat.py, completions.py   the shapes of the two endpoints, whole and streamed
    protocol.py     the wire before a body: heads under limits, what is no HTTP; outbox.py: one write a turn
    exchange.py     bodies in under limits, bytes out without waiting for anybody else's reader
    traffic.py      which class a request is of; attainment.py: how its promise is kept; timeline.py: the last steps
    batch/          files of requests, answered when there is room
    metrics.py, logs.py, keys.py, probes.py, models.py

Knows core, text and the engine's client. pydantic checks bodies here and goes no further; no tensor library.
"""
