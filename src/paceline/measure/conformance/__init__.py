"""The conformance pack: scripted streams with the values that a correct client reports for them.

`cases/*.json` is the data, readable without this package; `docs/measuring.md` explains its fields. The rest plays the
cases to any client and compares what the client says with what it should.
"""
