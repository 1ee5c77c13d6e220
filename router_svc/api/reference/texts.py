"""What the fields of requests mean, for the OpenAPI document. Bounds and types come from the bodies themselves."""

from __future__ import annotations

#: The texts of fields whose name does not say everything. An absent or null field takes the default named here.
FIELDS = {
    "allowed_tools": "Some of the tools, and whether one of them has to be called.",
    "add_generation_prompt": "Whether the template starts the assistant's message. Default: true.",
    "add_special_tokens": "Whether the tokenizer adds its special tokens. Default: true for prompts, false for "
    "conversations, because the template contains them.",
    "allowed_token_ids": "The only tokens of the output, below the size of the vocabulary. Default: all.",
    "background": "Answers at once; the client comes back for the response. Needs a store. Default: false.",
    "bad_words": "Texts that the output does not contain where they are tokenized as at its start or behind a space.",
    "timeout": "Seconds from the arrival until the request ends, complete or not.",
    "cache_salt": "Cached blocks are shared only with prompts of the same salt, within the tenant.",
    "chat_template": "A template in place of the model's; needs `--trust-request-chat-template`.",
    "chat_template_kwargs": "Variables for the template. Any identifier is taken, also with letters of other "
    "scripts, except the variables that the server sets.",
    "completion_window": "Time after which the batch expires.",
    "endpoint": "The endpoint of all requests of the file.",
    "input_file_id": "A file with one request per line.",
    "choices": "The possible answers, of which each value is there once.",
    "choice": "The output is one of these texts.",
    "arguments": "The arguments of the call, as JSON text.",
    "continue_final_message": "Goes on with the last message, of the assistant. Needs `add_generation_prompt`: false.",
    "continuous_usage_stats": "Every event has the usage so far; needs `include_usage`.",
    "description": "Accepted without effect, except that of an answer to a question, which the model reads.",
    "disable_additional_properties": "Objects have only the properties that the schema names. Default: false.",
    "dimensions": "Length of each embedding: its first numbers are kept. Default: the model's hidden size, which "
    "is also the largest value.",
    "disable_any_whitespace": "JSON has no white space between its tokens. Default: false.",
    "documents": "Documents for a template that shows them; any other one refuses them. Of `/v1/rerank`: the texts "
    "that are ranked.",
    "echo": "Choices start with the prompt, and `logprobs` with its tokens. All choices together repeat at most 8 Mi "
    "characters.",
    "encoding_format": "`base64`: numbers as little-endian float32, which is shorter. Default: `float`.",
    "frequency_penalty": "Lowers a token by this for each time it has been sampled. Default: 0.",
    "function": "The function: of a tool with its parameters, of a choice its name, of a call its arguments.",
    "grammar": "The output is a text of this context-free grammar, in GBNF or Lark's notation.",
    "guided_choice": "The output is one of these texts. Older name of `structured_outputs.choice`.",
    "guided_grammar": "Older name of `structured_outputs.grammar`.",
    "guided_json": "Older name of `structured_outputs.json`.",
    "guided_regex": "Older name of `structured_outputs.regex`.",
    "guided_whitespace_pattern": "White space between the tokens of `guided_json`, as a regular expression.",
    "id": "The id of the call, as the answer had it.",
    "ignore_eos": "Goes on after the token that ends a text. Default: false.",
    "include": "What the response has besides: `message.output_text.logprobs`, `reasoning.encrypted_content`.",
    "include_stop_str_in_output": "Whether the text has the stop string that ended it. Default: false.",
    "index": "Accepted without effect.",
    "include_reasoning": "Whether the answer has the model's thinking. Default: true.",
    "include_obfuscation": "Only false: events are never padded.",
    "include_usage": "A last event has the usage of the whole request.",
    "input": "The conversation: a text, or items as of earlier responses. Of embeddings: a text, token ids below the "
    "size of the vocabulary, or a list of either kind.",
    "instructions": "What comes first, as the system's message; of a question, the question.",
    "label": "The name of the level.",
    "levels": "The levels of a scale, in their order. They are numbered from 0.",
    "json": "The output is JSON that this schema accepts; the schema may also be given as its text.",
    "json_object": "The output is any JSON object.",
    "json_schema": "A schema and its name. The output is JSON that it accepts.",
    "logit_bias": "Biases by token id, a decimal number below the size of the vocabulary.",
    "logprobs": "Log-probabilities: of a chat, whether to report them; of a completion, how many alternatives of each "
    "token. Together a request may have 65,536 entries.",
    "logprob_token_ids": "Tokens below the size of the vocabulary whose log-probabilities are reported, too; needs "
    "`logprobs`.",
    "max_completion_tokens": "Newer name of `max_tokens`. If both are sent, they have to be equal.",
    "max_output_tokens": "Tokens to generate at most. Default: the rest of the context.",
    "max_tokens": "Tokens to generate at most. Prompt and completion together fit into `max_model_len`. Default: 16 "
    "for completions, the rest of the context for chats. 0 needs `echo`.",
    "messages": "The conversation. The model's template may refuse an order of roles.",
    "min_p": "Leaves out tokens below this share of the likeliest token's probability. Default: the model's, else 0.",
    "min_tokens": "Tokens before the text may end; at most as many as may be generated. Default: 0.",
    "mode": "`required`: one of the tools has to be called.",
    "model": "The name in `GET /v1/models`; for others the answer is 404.",
    "n": "Choices for each prompt. Prompts times `n` are at most 512. Default: 1.",
    "name": "Name of the participant, for templates that show it; of a question, which its answer repeats; of a "
    "schema, without effect.",
    "normalize": "Whether embeddings have length 1. Default: true.",
    "parallel_tool_calls": "Whether the answer may have several calls. Default: true.",
    "parameters": "A JSON schema of an object. Default: no arguments.",
    "pooling": "The hidden states that make an embedding: of the last token, of the first (`cls`), or the mean of all. "
    "Default: as the model's files say, else `last`.",
    "presence_penalty": "Lowers tokens that have been sampled by this. Default: 0.",
    "priority": "Lower values are admitted first. Other values than 0 need `--scheduling-policy priority`.",
    "truncation": "auto: the earliest items of a conversation that is too long for the context are left out.",
    "previous_response_id": "The stored response after which the conversation goes on. Needs a store.",
    "prompt": "A text, token ids below the size of the vocabulary, or a list of either kind.",
    "prompt_name": "One of the prompts in the model's config_sentence_transformers.json, which comes before each text.",
    "prompt_logprobs": "Log-probabilities of the prompt's tokens, with so many alternatives of each. Needs `stream`: "
    "false. Together a request may have 65,536 entries for prompts.",
    "prompt_cache_options": "Accepted without effect: every prefix is cached.",
    "questions": "The questions about the input, each answered by itself.",
    "query": "The text to which the documents are compared.",
    "reasoning": "The assistant's thinking.",
    "reasoning_content": "The assistant's thinking, under its other name.",
    "reasoning_effort": "How much the model thinks, for its template. `none`: not at all.",
    "regex": "The whole output matches this regular expression.",
    "repetition_penalty": "Divides the logits of tokens that occurred. Default: the model's, else 1.",
    "response_format": "What the output has to match. Parts of a schema that cannot be enforced are refused with 400. "
    "At most one of this, `structured_outputs` and the fields `guided_*` may ask for something.",
    "return_documents": "Whether the answer has the texts. Default: true.",
    "return_token_strs": "Whether the answer has the tokens as text, too. Default: false.",
    "return_token_ids": "Whether the answer has the token ids of prompt and output. Default: false.",
    "role": "Who speaks. Only the assistant's message may omit its content.",
    "schema": "A JSON schema.",
    "seed": "Equal requests with the same seed have the same answer. Default: random.",
    "skip_special_tokens": "Whether special tokens are left out of the text. Default: true.",
    "stop": "Texts that end the completion.",
    "stop_token_ids": "Tokens that end the completion, below the size of the vocabulary.",
    "stream": "Answers with server-sent events as tokens come. Default: false.",
    "store": "Whether the response is stored. Default: true where the server stores responses.",
    "stream_options": "Needs `stream`.",
    "strict": "Accepted without effect: every schema is enforced.",
    "structured_outputs": "What the output has to match: exactly one of `json`, `regex`, `choice`, `grammar`, "
    "`json_object` and `structural_tag`.",
    "temperature": "0 is greedy. Default: the model's, else 1.",
    "budget_tokens": "Tokens of thinking at most. Without effect for models that do not think, and other types.",
    "cache_control": "Accepted without effect: every prefix is cached.",
    "caller": "Accepted without effect.",
    "citations": "Accepted without effect.",
    "data": "Thinking of another server, which is left out; of `input_json`, what the model gets as JSON text.",
    "disable_parallel_tool_use": "Whether the answer has one call at most. Default: false.",
    "display": "`omitted`: blocks of thinking have a signature and no text.",
    "effort": "How much the model thinks, for its template.",
    "input_schema": "A JSON schema of an object.",
    "is_error": "Whether the tool has failed, which the model is shown.",
    "output_config": "What the answer has to be like.",
    "signature": "As the answer had it. It is not checked.",
    "stop_sequences": "Texts that end the answer.",
    "system": "Instructions before the conversation.",
    "text_1": "One text, or as many as in `text_2`.",
    "text_2": "A text, or a list of them.",
    "thinking": "The thinking of an earlier answer.",
    "thinking_token_budget": "Tokens of thinking at most, behind which it is ended; -1: any number. A model that does "
    "not think refuses it. Default: -1.",
    "num_predict": "Tokens to generate at most. -1, -2, 0, or absent: until the context ends, which may end it before.",
    "options": "How tokens are chosen. Unknown ones are ignored and named in a header.",
    "raw": "Whether the prompt goes to the model as it is, without its template. Default: false.",
    "repeat_penalty": "Divides the logits of tokens that occurred, anywhere before. Default: the model's, else 1.",
    "tool_name": "The tool whose result it is.",
    "tool_use_id": "The id of the call.",
    "tokens": "Token ids below the size of the vocabulary, at most as many as the context holds.",
    "top_n": "How many of the best documents the answer has. Default: all.",
    "top_k": "How many of the likeliest tokens are sampled from; -1 or 0: all. Default: the model's, else all.",
    "tool_calls": "The calls of an earlier answer.",
    "tool_choice": "Whether the answer has calls: `none`, `auto`, `required`, a function, or some functions. "
    "Default: `auto`.",
    "tools": "The functions that the model may call. The output is held to a grammar, so that every call can be read.",
    "top_logprobs": "Alternatives of each token; needs `logprobs`. Default: 0.",
    "truncate_prompt_tokens": "Keep only so many of the prompt's last tokens; -1: as many as the output leaves space "
    "for.",
    "whitespace_pattern": "White space between the tokens of JSON, as a regular expression. Default: one space, or a "
    "newline with up to 32 spaces.",
    "top_p": "Share of probability that is sampled from. Default: the model's, else 1.",
    "any_order": "Properties come in the order of the schema.",
    "at_least_one": "Whether there is a tag. Triggered tags then start with one. Default: false.",
    "begin": "The text with which a tag starts.",
    "elements": "Formats: one after the other of a `sequence`, one of several of an `or`.",
    "end": "The text with which a tag ends, or several of which the output has one.",
    "excludes": "Texts that the free text does not have.",
    "format": "What the output consists of, as a tree; or `structures` and `triggers`.",
    "max": "How often the content comes at most; -1 is no bound.",
    "min": "How often the content comes at least.",
    "pattern": "A regular expression, for the whole of this text.",
    "separator": "The text between two tags.",
    "stop_after_first": "Whether nothing follows the first tag. Default: false.",
    "structural_tag": "Free text in which tags have a structure, as an object or its text.",
    "structures": "Tags with JSON, in the older form.",
    "style": "How the values of the schema are written.",
    "tags": "The tags that may come.",
    "triggers": "Texts that are free text nowhere: each is the beginning of a tag.",
    "value": "Exactly this text; of a choice, its name.",
}

ABOUT = """\
The HTTP API of pdserve: OpenAI's APIs with vLLM's extensions, and paths for operators.

**Keys.** A router that has API keys asks for one on every path that is not marked as open. A router without keys \
asks for none.

**Requests.** Bodies are JSON objects. An unknown field, or one of the wrong type, is refused with 400, and `null` \
means that a field is not given. The Responses, Messages and Ollama APIs ignore unknown fields \
and name them in a header. Integers are written without fraction and exponent: 1.0 is no integer here. Texts \
are valid Unicode, so the escape of half a surrogate pair is refused. A body has at most 64 levels of nesting and \
256 fields, and its objects have at most 300 keys. What one request may cost is limited; beyond it the answer is 413.

**Limits of the model.** Token ids are below the size of the vocabulary, and prompt and completion together fit into \
the context. Both depend on the model, so this document cannot state them; the answer is then 400.

**Methods.** What answers GET answers HEAD, too, without a body; only the console's events do not. Another method \
gets 405 and `Allow`. With `--allowed-origins`, OPTIONS answers the preflight requests of browsers with 204.

**Errors** have the form of `Error`, below /v1/messages that of `MessagesError`, and below /api/ that of \
`OllamaError`. A path that does not exist has \
404 in the same form. What is not HTTP is answered with 400 and `Error`, and lines beyond a limit with 431; then the \
connection is closed. An unknown `Expect` header is answered with 417.
"""

TAGS = {
    "Generation": "Completions and chats, whole or streamed.",
    "Files": "Files, and batches that read and write them, with `--state-url`; without it the answer is 404.",
    "Embeddings": "Vectors of texts. Prefill workers compute them.",
    "Responses": "Responses that are stored, with `--state-url`; without it the answer is 404.",
    "Model": "The served model and its tokenizer.",
    "Usage": "Tokens of tenants, as routers with API keys count them. An unknown parameter is refused.",
    "Probes": "What orchestrators and load balancers ask. They need no key.",
    "Operators": "The cluster and its requests. With `--admin-port`, these paths are on that port only.",
    "Console": "The page about the cluster. With `--admin-port`, it is on that port only.",
    "Reference": "This document, and a page that shows it. They need no key.",
}
