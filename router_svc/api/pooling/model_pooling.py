"""How a model's embeddings are made, as the files of sentence-transformers say."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.base.errors import RequestError, SetupError
from pdserve.base.pooling import PoolingKind
from pdserve.model.fields import Fields, read_text

_MAX_MODULES_BYTES = 1 << 20
#: Modules of sentence-transformers that are known. With any other one, the model's own pooling is not computed.
_KNOWN_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
#: The names of pooling modes, as one text, and as flags in older files.
_KINDS = {"lasttoken": PoolingKind.LAST, "cls": PoolingKind.CLS, "mean": PoolingKind.MEAN}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPooling:
    """How embeddings are made for a request that says nothing of pooling."""

    #: Numbers of an embedding: the hidden size.
    dimensions: int = 0
    kind: PoolingKind = PoolingKind.LAST
    #: Why embeddings as the model's files want them cannot be computed; empty: they can.
    unsupported: str = ""
    #: Texts that may come before an input, by their names.
    prompts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dir(cls, model_dir: Path, dimensions: int) -> ModelPooling:
        """Without a modules.json, the last token is taken. Raises `SetupError` for files that cannot be read."""
        prompts = _prompts(Fields.read_optional(model_dir / "config_sentence_transformers.json"))
        kind, unsupported = PoolingKind.LAST, ""
        for name, path in _modules(model_dir / "modules.json"):
            if name not in _KNOWN_MODULES:
                unsupported = f"modules.json has a module {name[:100]!r}, which is not computed"
            elif name == "Pooling":
                config = Fields.read_optional(model_dir / path / "config.json")
                modes = _modes(config)
                if not config.flag("include_prompt", True):
                    prompts = {}  # The prompt's tokens would have to be left out of the mean.
                if len(modes) == 1 and modes[0] in _KINDS:
                    kind = _KINDS[modes[0]]
                elif modes:
                    unsupported = f"{path}/config.json pools by {' and '.join(modes)[:100]}, which is not computed"
        return cls(dimensions=dimensions, kind=kind, unsupported=unsupported, prompts=prompts)

    def kind_for(self, requested: str | None) -> PoolingKind:
        """How a request is pooled. Raises `RequestError` if the model's own pooling cannot be computed."""
        if requested is not None:
            return PoolingKind(requested)
        if self.unsupported:
            raise RequestError(
                f"The model's file {self.unsupported}. Send `pooling` to have it pooled by last, cls or mean.",
                param="pooling",
            )
        return self.kind

    def prompt(self, name: str | None) -> str:
        """The text of that name that comes before inputs; none without a name. Raises `RequestError`."""
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)[:16]) or "none"
            raise RequestError(
                f"`prompt_name` is {name[:100]!r}, but the model's prompts are: {known[:400]}. Leave it out, or "
                "put the text before the input.",
                param="prompt_name",
            )
        return self.prompts[name]


def _prompts(config: Fields) -> dict[str, str]:
    prompts = config.object("prompts")
    return {name: prompts.text(name) for name in prompts.names() if prompts.has(name)}


def _modules(path: Path) -> list[tuple[str, str]]:
    """Class name and directory of each module; empty without the file."""
    if not os.path.lexists(path):
        return []
    try:
        entries = json.loads(read_text(path, _MAX_MODULES_BYTES))
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SetupError(f"{path} must hold a list of objects, one for each module.")
    modules = []
    for entry in entries:
        module = Fields(entry, str(path))
        directory = module.text("path", "")
        if directory.startswith("/") or ".." in directory.split("/"):
            raise module.wrong("path", "a directory within the model's")
        modules.append((module.text("type").rpartition(".")[2], directory))
    return modules


def _modes(config: Fields) -> list[str]:
    if config.has("pooling_mode"):
        mode = config.raw("pooling_mode")
        return [mode] if isinstance(mode, str) else list(config.texts("pooling_mode"))
    return [mode for flag, mode in _FLAGS.items() if config.flag(flag, False)]
