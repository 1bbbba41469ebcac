"""Text: between strings and token ids.

The tokenizer with its chat template, and what turns a growing list of ids back into text that can be shown at once:
incremental detokenizing, stop strings, per-token log-probabilities as people read them. Needs `tokenizers` and
`jinja2`, never a tensor library. `serve` and `app` use it; the engine and the scheduler see ids alone.
"""
