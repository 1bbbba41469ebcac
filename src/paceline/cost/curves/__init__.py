"""How far below a chip's peaks each kind of kernel stays, and why: one file and one set of constants each."""
