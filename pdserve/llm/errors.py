"""Errors of the Python API. All are `PdserveError`s; those of a bad argument are `ValueError`s, too, as in vLLM."""

from __future__ import annotations

from pdserve.base.errors import PdserveError, RequestError


class PromptRefused(RequestError, ValueError):
    """The server refuses a prompt or its parameters. `param` names the field, `index` the prompt in a list."""

    def __init__(self, message: str, *, param: str | None = None, index: int | None = None) -> None:
        super().__init__(message, param=param)
        self.index = index


class PromptFailed(PdserveError):
    """A prompt of a list failed for another reason, which is the cause. `index` is its index in the list."""

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class ShutDown(PdserveError, RuntimeError):
    """The `LLM` or `AsyncLLM` was shut down, before a call or while it ran."""

    def __init__(self) -> None:
        super().__init__("This LLM was shut down. Make another one.")


def of_prompt(error: Exception, index: int, count: int) -> Exception:
    """The error of a prompt in a list, with its index. Those that are not of the server are as they were."""
    if not isinstance(error, PdserveError) or (count == 1 and not isinstance(error, PromptRefused)):
        return error
    message = str(error) if count == 1 else f"Prompt {index} of {count}: {error}"
    if isinstance(error, PromptRefused):
        return PromptRefused(message, param=error.param, index=index)
    return PromptFailed(message, index=index)
