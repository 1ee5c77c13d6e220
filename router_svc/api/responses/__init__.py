"""OpenAI's Responses API: items in, items out, on top of chats."""
