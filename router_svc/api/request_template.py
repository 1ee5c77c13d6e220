"""Chat templates that come with requests, where the router takes them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from pdserve.model.chat_template import ChatTemplate
from router_svc.api.served_model import ServedModel
from router_svc.api.text_threads import LONG_CHARACTERS


async def with_template(model: ServedModel, source: str) -> ServedModel:
    """The model with a client's template in place of its own. Raises `RequestError`.

    Messages keep the model's form. Whether there is thinking, and tools are shown, follows from the template.
    """

    def make() -> ChatTemplate:
        return ChatTemplate.of_client(source, model.template.special_tokens)

    key = hashlib.sha256(source.encode(errors="surrogatepass")).digest()
    # A short template can take long to compile, too. One of the threads stays free.
    template = await model.threads.run(LONG_CHARACTERS + 1, lambda: model.templates.get(key, make))
    return replace(model, template=template, messages=model.messages.with_template(template), has_own_template=False)
