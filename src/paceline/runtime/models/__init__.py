"""Model families, one file each; `registry` maps the architecture named by a checkpoint to its file."""
