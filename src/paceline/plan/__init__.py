"""Sizing answers for people: what a model does on a chip, with the formula and the numbers put in."""
