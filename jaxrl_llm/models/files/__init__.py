"""Models and tokenizers as files: Hugging Face folders, GGUF."""
