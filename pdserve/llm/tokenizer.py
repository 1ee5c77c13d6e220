"""The server's tokenizer, with the method names of transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.llm.client import Client
from pdserve.llm.prompts import Message


class AsyncTokenizer:
    """The tokenizer that the server uses, over its HTTP API: nothing is loaded here."""

    def __init__(self, client: Client, info: dict[str, Any]) -> None:
        """`info`: the answer of `GET /tokenizer_info`."""
        self._client = client
        self.vocab_size: int = info["vocab_size"]
        self.bos_token: str | None = info["bos_token"]
        self.eos_token: str | None = info["eos_token"]
        self.eos_token_ids: list[int] = info["eos_token_ids"]
        self.chat_template: str | None = info["chat_template"]

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        body = {"model": self._client.model, "prompt": text, "add_special_tokens": add_special_tokens}
        token_ids: list[int] = (await self._client.post("/tokenize", body))["tokens"]
        return token_ids

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises `PromptRefused` for ids beyond the vocabulary."""
        body = {"model": self._client.model, "tokens": list(token_ids)}
        return str((await self._client.post("/detokenize", body))["prompt"])

    async def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: object,
    ) -> list[int]:
        """Token ids of a conversation, as `chat` sends them to the model."""
        body: dict[str, Any] = {
            "model": self._client.model,
            "messages": list(conversation),
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            body["tools"] = tools
        if template_kwargs:
            body["chat_template_kwargs"] = template_kwargs
        token_ids: list[int] = (await self._client.post("/tokenize", body))["tokens"]
        return token_ids
