"""The values of `--message-format`."""

from __future__ import annotations

#: As the model's files say, and messages that are plain text.
AUTO, NONE = "auto", "none"
FORMAT_NAMES = (
    *("hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_list", "deepseek_v3", "deepseek_v31"),
    "gpt_oss",
)
