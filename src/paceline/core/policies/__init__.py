"""One file a policy: who gets how many tokens in this step, and who gives way when memory runs out.

To write one, copy `decode_first.py`, change what it decides, and add a line to `registry.py`.
"""
