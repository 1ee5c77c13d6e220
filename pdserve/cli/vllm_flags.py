"""Flags of `vllm serve` that `pdserve up` takes under another name, accepts because it does what they ask, or refuses.

Pure. Flags with the same name and meaning in both, such as `--max-model-len`, are not here: they need no translation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdserve.base.errors import SetupError


@dataclass(frozen=True, slots=True)
class Renamed:
    """Passed on under our name; the empty name is the model's position."""

    name: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """Dropped with a note, because pdserve does it anyway. A flag with a value has one of `values`; *: any."""

    note: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """An error that says what to do instead."""

    advice: str


_ALWAYS_CACHED = "prefixes are always cached; no answer depends on it"
_ALWAYS_CHUNKED = "prompts are always computed in chunks; --max-num-batched-tokens is their size"
_NO_REQUEST_LOG = "prompts and answers are never logged"
_FROM_FILES = "how the model writes calls and thinking follows from its files; --message-format names another form"
_LATER = "is not supported yet; omit it"

FLAGS: Mapping[str, Renamed | Accepted | Refused] = {
    "--model": Renamed(""),
    "-tp": Renamed("--tensor-parallel-size"),
    "-q": Renamed("--quantization"),
    "-dp": Renamed("--decode"),
    "--data-parallel-size": Renamed("--decode"),
    "--download-dir": Renamed("--cache-dir"),
    "--kv-cache-memory-bytes": Renamed("--kv-cache-memory"),
    "--uvicorn-log-level": Renamed("--log-level"),
    "--shutdown-timeout": Renamed("--drain-timeout-s"),
    "--trust-remote-code": Accepted("a model's own code is never run, and not needed for the supported architectures"),
    "--enable-prefix-caching": Accepted(_ALWAYS_CACHED),
    "--enable-chunked-prefill": Accepted(_ALWAYS_CHUNKED),
    "--disable-log-requests": Accepted(_NO_REQUEST_LOG),
    "--no-enable-log-requests": Accepted(_NO_REQUEST_LOG),
    "--disable-log-stats": Accepted("statistics are metrics, not log lines"),
    "--load-format": Accepted("weights are read from safetensors or GGUF", ("auto", "safetensors", "gguf")),
    "--generation-config": Accepted("the model's generation defaults are always used", ("auto",)),
    "--pipeline-parallel-size": Accepted("a model is divided by --tensor-parallel-size only", ("1",)),
    "-pp": Accepted("a model is divided by --tensor-parallel-size only", ("1",)),
    "--seed": Accepted("requests carry their own seed; the same seed gives the same answer", ("*",)),
    "--reasoning-parser": Accepted(_FROM_FILES, ("*",)),
    "--tool-call-parser": Accepted(_FROM_FILES, ("*",)),
    "--enable-auto-tool-choice": Accepted("tools can always be called"),
    "--enable-tokenizer-info-endpoint": Accepted("/tokenizer_info always answers"),
    "--no-enable-prefix-caching": Refused(f"{_ALWAYS_CACHED}. Omit it"),
    "--no-enable-chunked-prefill": Refused(f"{_ALWAYS_CHUNKED}. Omit it"),
    "--kv-transfer-config": Refused("the tiers hand KV over by themselves. Use --prefill, --decode and --transport"),
    "--revision": Refused("the revision is a part of the model's name. Write ORG/NAME@REVISION"),
    "--tokenizer": Refused("the tokenizer is the model's own. Put tokenizer.json into the model's directory"),
    "--chat-template": Refused("the template is the model's own. Put chat_template.jinja into the model's directory"),
    "--cpu-offload-gb": Refused("weights stay on the device. Use --quantization int8 or --tensor-parallel-size"),
    "--swap-space": Refused("preempted sequences are computed again, not swapped. Omit it"),
    "--enable-lora": Refused(f"serving LoRA adapters {_LATER}, or merge the adapter into the weights"),
    "--speculative-config": Refused(f"speculative decoding {_LATER}"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Arguments of `pdserve up`, and a note on each flag that was accepted and dropped."""

    arguments: list[str]
    notes: list[str]


def translate(arguments: Sequence[str]) -> Translation:
    """Translates the flags above and passes all others on. Raises `SetupError` for one that is refused."""
    translated: list[str] = []
    notes: list[str] = []
    words = iter(arguments)
    for word in words:
        # vLLM takes underscores as well.
        name, equals, value = word.partition("=")
        known = FLAGS.get(name.replace("_", "-") if name.startswith("--") else name)
        match known:
            case None:
                translated.append(word)
            case Renamed():
                translated += [known.name] * bool(known.name) + [value if equals else _next(words, name)]
            case Accepted():
                if known.values:
                    _check(name, value if equals else _next(words, name), known)
                notes.append(f"{name}: {known.note}.")
            case Refused():
                raise SetupError(f"{name} is a flag of vLLM: {known.advice}.")
    return Translation(arguments=translated, notes=notes)


def _next(words: Iterator[str], name: str) -> str:
    value = next(words, None)
    if value is None:
        raise SetupError(f"{name} needs a value.")
    return value


def _check(name: str, value: str, flag: Accepted) -> None:
    if flag.values != ("*",) and value not in flag.values:
        raise SetupError(f"{name} {value} is not supported: {flag.note}. Supported: {', '.join(flag.values)}.")
