"""How checkpoints lie on disk: Hugging Face folders with safetensors, and single GGUF files."""
