"""One question a file. Each has `ask(case)`, which returns its Answer, or None where it does not arise."""
