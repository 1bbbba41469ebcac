"""The KV pool and attention over it. Knows tensors and block tables, no models."""
