"""measure: put a stated load on any OpenAI-compatible server and say what its users would have felt.

Load and clients, raw records, exact metrics, honest statistics, one report. Knows HTTP; knows no engine.
"""
