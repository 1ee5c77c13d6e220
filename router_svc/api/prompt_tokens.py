"""What requests say of the tokens of prompts: how many to keep, and whether to repeat them in the answer."""

from __future__ import annotations

from pdserve.base.errors import RequestError, TooLarge

#: Value of `truncate_prompt_tokens` for as many tokens as fit.
ALL_THAT_FIT = -1
#: Token ids of prompts that one response repeats: about 6 MiB.
MAX_REPEATED_IDS = 1_048_576


def tokens_to_keep(truncate: int | None, output_tokens: int, max_model_len: int) -> int | None:
    """How many of a prompt's last tokens are kept; None: all. `output_tokens` have to fit behind them.

    Raises `RequestError` for a number that is none of tokens.
    """
    if truncate is not None and truncate != ALL_THAT_FIT and truncate < 1:
        raise RequestError(
            f"`truncate_prompt_tokens` is {truncate}, but must be -1 or at least 1.", param="truncate_prompt_tokens"
        )
    return max(1, max_model_len - output_tokens) if truncate == ALL_THAT_FIT else truncate


def require_few_token_ids(num_repeated: int) -> None:
    """Raises `TooLarge` if the choices of a response together repeat too many token ids of prompts."""
    if num_repeated > MAX_REPEATED_IDS:
        raise TooLarge(
            f"`return_token_ids` repeats {num_repeated} token ids of prompts (limit {MAX_REPEATED_IDS}). Lower n, or "
            "leave return_token_ids out.",
            param="return_token_ids",
        )
