"""cost: how long a step takes. Implements core's `CostModel`; numpy at most."""
