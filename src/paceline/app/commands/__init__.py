"""The commands, one file a group. Each has `register(app)`; each imports what is heavy inside the command."""
