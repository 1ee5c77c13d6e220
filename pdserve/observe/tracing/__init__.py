"""Traces of requests: the context that travels, spans as values, and their export, which a process may switch on."""
