"""Measurements on GPUs that others have published, each beside what the simulator says: see `fidelity_gpu.py`."""
