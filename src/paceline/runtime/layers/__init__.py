"""Building blocks of decoders: linear maps, norms, rotary embeddings, mixtures of experts."""
