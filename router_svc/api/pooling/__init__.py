"""Embeddings of prompts, and what is made of them: scores of pairs, and ranks of documents."""
