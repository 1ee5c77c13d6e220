"""A model: its config, weights, tokenizer, chat template and decoder; `fetch` gets and converts one."""
