"""What an assistant's message consists of, as the model's family writes it: text, thinking and calls of tools."""
