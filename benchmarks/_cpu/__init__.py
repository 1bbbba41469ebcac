"""Parts of benchmarks/cpu.py: models and their files, peers in environments of their own, what is measured, figures."""
