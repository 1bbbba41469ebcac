"""app: the `paceline` command, the Python API and the wiring.

The only room that may know all the others. It reads settings (once, `config`), finds or fetches the model (`store`),
builds an engine from both (`build`) and puts a face on it: a server (`serving`), a terminal (`generate`, `chat`) or a
Python object (`llm`). Nothing here decides anything about a request.
"""
