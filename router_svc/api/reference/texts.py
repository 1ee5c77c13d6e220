"""What the fields of requests mean, for the OpenAPI document. Bounds and types come from the bodies themselves."""

from __future__ import annotations

#: By field, where the name does not say everything. An absent or null field takes the default named here.
FIELDS = {
    "add_generation_prompt": "Whether the template starts the assistant's message. Default: true.",
    "add_special_tokens": "Whether the tokenizer adds its special tokens. Default: true for prompts, false for "
    "conversations, because the template contains them.",
    "timeout": "Seconds from the arrival until the request ends, complete or not.",
    "cache_salt": "Cached blocks are shared only with prompts of the same salt, within the tenant.",
    "chat_template_kwargs": "Variables for the model's template. Any identifier is taken, also with letters of other "
    "scripts, except the variables that the server sets.",
    "continuous_usage_stats": "Every event has the usage so far; needs `include_usage`.",
    "echo": "Choices start with the prompt. All choices together repeat at most 8 Mi characters.",
    "frequency_penalty": "Lowers a token by this for each time it has been sampled. Default: 0.",
    "ignore_eos": "Goes on after the token that ends a text. Default: false.",
    "include_stop_str_in_output": "Whether the text has the stop string that ended it. Default: false.",
    "include_usage": "A last event has the usage of the whole request.",
    "logit_bias": "Biases by token id, a decimal number below the size of the vocabulary.",
    "logprobs": "Log-probabilities: of a chat, whether to report them; of a completion, how many alternatives of each "
    "token. Together a request may have 65,536 entries.",
    "max_completion_tokens": "Newer name of `max_tokens`. If both are sent, they have to be equal.",
    "max_tokens": "Tokens to generate at most. Prompt and completion together fit into `max_model_len`. Default: 16 "
    "for completions, the rest of the context for chats.",
    "messages": "The conversation. The model's template may refuse an order of roles.",
    "min_p": "Leaves out tokens below this share of the likeliest token's probability. Default: the model's, else 0.",
    "min_tokens": "Tokens before the text may end; at most as many as may be generated. Default: 0.",
    "model": "The name in `GET /v1/models`; for others the answer is 404.",
    "n": "Choices for each prompt. Prompts times `n` are at most 512. Default: 1.",
    "name": "Name of the participant, for templates that show it.",
    "presence_penalty": "Lowers tokens that have been sampled by this. Default: 0.",
    "priority": "Lower values are admitted first. Other values than 0 need `--scheduling-policy priority`.",
    "prompt": "A text, token ids below the size of the vocabulary, or a list of either kind.",
    "repetition_penalty": "Divides the logits of tokens that occurred. Default: the model's, else 1.",
    "return_token_strs": "Whether the answer has the tokens as text, too. Default: false.",
    "role": "Who speaks. Only the assistant's message may omit its content.",
    "seed": "Equal requests with the same seed have the same answer. Default: random.",
    "skip_special_tokens": "Whether special tokens are left out of the text. Default: true.",
    "stop": "Texts that end the completion.",
    "stop_token_ids": "Tokens that end the completion, below the size of the vocabulary.",
    "stream": "Answers with server-sent events as tokens come. Default: false.",
    "stream_options": "Needs `stream`.",
    "temperature": "0 is greedy. Default: the model's, else 1.",
    "tokens": "Token ids below the size of the vocabulary, at most as many as the context holds.",
    "top_k": "How many of the likeliest tokens are sampled from; -1 or 0: all. Default: the model's, else all.",
    "top_logprobs": "Alternatives of each token; needs `logprobs`. Default: 0.",
    "top_p": "Share of probability that is sampled from. Default: the model's, else 1.",
}

ABOUT = """\
The HTTP API of pdserve: OpenAI's completion and chat API with vLLM's extensions, and paths for operators.

**Keys.** A router that has API keys asks for one on every path that is not marked as open. A router without keys \
asks for none.

**Requests.** Bodies are JSON objects. An unknown field, or one of the wrong type, is refused with 400, and `null` \
means that a field is not given. Integers are written without fraction and exponent: 1.0 is no integer here. Texts \
are valid Unicode, so the escape of half a surrogate pair is refused. A body has at most 64 levels of nesting and \
256 fields, and its objects have at most 300 keys. What one request may cost is limited; beyond it the answer is 413.

**Limits of the model.** Token ids are below the size of the vocabulary, and prompt and completion together fit into \
the context. Both depend on the model, so this document cannot state them; the answer is then 400.

**Methods.** What answers GET answers HEAD, too, without a body; only the console's events do not. Another method \
gets 405. With `--allowed-origins`, OPTIONS answers the preflight requests of browsers with 204.

**Errors** have the form of `Error`. A path that does not exist has 404 in the same form. What is no HTTP is answered \
with 400 and plain text, and the connection is closed; so is an unknown `Expect` header, with 417.
"""

TAGS = {
    "Generation": "Completions and chats, whole or streamed.",
    "Model": "The served model and its tokenizer.",
    "Usage": "Tokens of tenants, as routers with API keys count them. An unknown parameter is refused.",
    "Probes": "What orchestrators and load balancers ask. They need no key.",
    "Operators": "The cluster and its requests. With `--admin-port`, these paths are on that port only.",
    "Console": "The page about the cluster. With `--admin-port`, it is on that port only.",
    "Reference": "This document, and a page that shows it. They need no key.",
}
