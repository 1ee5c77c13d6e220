"""Triton's language in its interpreter, patched once for each module with kernels.

The interpreter replaces the functions of `triton.language` at every launch and looks for them again at every call of a
device function. Small kernels spend most of their time there. Here the replacements stay.
"""

from __future__ import annotations

from collections.abc import Callable


def install() -> None:
    """Patch the language when a module's first kernel needs it, and never restore it: nothing is compiled here."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[str] = set()

    def patch_once(kernel: Callable[..., object]) -> interpreter._LangPatchScope:
        if kernel.__module__ not in patched:
            patch(kernel)
            patched.add(kernel.__module__)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
