"""Prompts of the golden tests of the default model: English, code, Korean, emoji, chat, short, repetitive and long."""

from __future__ import annotations

_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

SHORT_PROMPTS = (
    _CHAT.format("What is the capital of France?"),
    _CHAT.format("Write a haiku about the sea."),
    _CHAT.format("Explain in two sentences why the sky is blue."),
    _CHAT.format("대한민국의 수도는 어디인가요?"),
    _CHAT.format("List three fruits 🍎🍌🍇 and one colour for each."),
    "Once upon a time, in a small village at the foot of a mountain,",
    "The three laws of thermodynamics are",
    "A",
    "1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):\n    ",
    'fn main() {\n    println!("{}", ',
    "SELECT name, count(*) FROM users\nWHERE ",
    '{"name": "Ada", "born": 1815, "children": [',
    "<html>\n<head>\n<title>",
    "안녕하세요. 오늘 날씨가 정말 좋네요. 우리는 함께",
    "옛날 옛적에 호랑이가 담배 피우던 시절에",
    "I love you 😀😃😄😁 and 🇰🇷 and 👩‍👩‍👧‍👦 because",
    "¿Cuál es la diferencia entre ser y estar? La diferencia",
    "to be or not to be " * 20,
    "\n\n\n   \t  \n",
)


def long_prompt(encode_length: int) -> str:
    """Numbered, varied sentences with more than `encode_length` tokens, for the caller to truncate."""
    words = ("river", "engine", "garden", "theorem", "harbour", "violin", "glacier", "market")
    sentences = (
        f"Note {number}: the {words[number % 8]} of {1900 + number} was {words[(number * 3 + 1) % 8]}-like."
        for number in range(encode_length // 10)
    )
    return " ".join(sentences)
