"""Getting a model: download it, convert GGUF files, and cache the result in Hugging Face layout."""
