"""From bytes to a validated body. Every mistake becomes a `RequestError` that names the field."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from pdserve.base.errors import RequestError, TooLarge
from pdserve.base.sampling import MAX_LOGIT_BIAS
from router_svc.api.body import Body
from router_svc.api.fields import IGNORED, MESSAGE_UNSUPPORTED, UNSUPPORTED, UNSUPPORTED_BECAUSE
from router_svc.api.structure import require_light

#: No body of this API needs deeper nesting.
MAX_NESTING = 64
#: Characters of a client's input that error texts repeat at most.
MAX_ECHO = 100
_MAX_ERRORS = 3
MAX_FIELDS = 256
#: Keys of any object of a body. Validation reports every unknown key in one call, during which no other thread runs.
MAX_KEYS = max(MAX_FIELDS, MAX_LOGIT_BIAS)

#: What the names of kinds start with. Pydantic adds these names to the path of an error, and they are left out of it.
TAG_MARK = "<kind>"

#: The type of errors within an entry of a list that is read by hand. Their context has where they are in the list.
LIST_ENTRY = "list_entry"

_TEMPLATE = "chat_template"

AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(
    cls: type[AnyBody], body: bytes, *, tolerates_unknown_fields: bool = False, trusts_templates: bool = False
) -> AnyBody:
    """The body as `cls`. `trusts_templates`: it may have a chat template of its own. Raises `RequestError`."""
    fields = _parse_json(body)
    if not trusts_templates and isinstance(fields, dict) and fields.get(_TEMPLATE) and _TEMPLATE in cls.model_fields:
        raise RequestError(
            f"`{_TEMPLATE}` is not supported: the router was started without --trust-request-chat-template. Omit it.",
            param=_TEMPLATE,
        )
    return validate(cls, fields, tolerates_unknown_fields=tolerates_unknown_fields)


def validate(cls: type[AnyBody], fields: object, *, tolerates_unknown_fields: bool = False) -> AnyBody:
    """Parsed fields as `cls`. Unknown ones are refused, or their names are in `ignored_fields` of the body.

    Raises `RequestError`.
    """
    if not isinstance(fields, dict):
        raise RequestError("The request body must be a JSON object.")
    _require_countable(fields)
    _require_shape(fields)
    is_tolerant = tolerates_unknown_fields or cls.tolerates_unknown_fields
    known, ignored = _without_unknown(fields, cls) if is_tolerant else (fields, ())
    try:
        body = cls.model_validate(known)
    except ValidationError as error:
        raise _as_request_error(error, cls) from None
    body._ignored_fields = ignored
    return body


def _without_unknown(fields: dict[Any, Any], cls: type[Body]) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """The fields that `cls` has, and the names of the others. What is known and not supported is not unknown."""
    ignored: dict[str, None] = {}

    def known(given: dict[Any, Any], model: type[BaseModel], others: Collection[str], path: str) -> dict[Any, Any]:
        names = model.model_fields.keys() | others
        ignored.update((f"{path}{name}"[:MAX_ECHO], None) for name in given if name not in names)
        return {name: value for name, value in given.items() if name in names}

    # A client of an endpoint that tolerates unknown fields sends many that mean something elsewhere only.
    others = IGNORED if cls.tolerates_unknown_fields else IGNORED | UNSUPPORTED.keys()
    kept = known(fields, cls, others, "")
    for name, model in cls.tolerant_lists.items():
        if isinstance(kept.get(name), list):
            kept[name] = [
                known(each, model, MESSAGE_UNSUPPORTED.keys(), f"{name}[].") if isinstance(each, dict) else each
                for each in kept[name]
            ]
    return kept, tuple(ignored)


def read_object(text: str) -> dict[str, object] | None:
    """The JSON object that a text within a body is; None: it is none, or it exceeds what a body may have."""
    try:
        found = _parse_json(text.encode(errors="replace"))
        if not isinstance(found, dict):
            return None
        _require_shape(found)
    except RequestError:
        return None
    return found


def _require_countable(fields: dict[object, object]) -> None:
    """Refuses collections that would take long to validate entry by entry. Raises `RequestError`."""
    if len(fields) > MAX_FIELDS:
        raise RequestError(f"The request body has {len(fields)} fields (limit {MAX_FIELDS}). Remove some.")
    bias = fields.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"`logit_bias` has {len(bias)} entries (limit {MAX_LOGIT_BIAS}). Remove some.", param="logit_bias"
        )


def _parse_json(body: bytes) -> object:
    require_light(body)
    try:
        # jiter refuses invalid UTF-8 and nesting beyond 200 levels. It accepts NaN: the field's validation refuses that
        # and can name the field.
        return from_json(body)
    except ValueError as error:
        raise RequestError(f"The request body is not valid JSON: {str(error)[:MAX_ECHO]}.") from None


def _require_shape(fields: dict[object, object]) -> None:
    """Bounds the nesting, and the keys of every object. Looks at containers only. Raises `RequestError`."""
    layer: list[object] = [fields]
    for _ in range(MAX_NESTING):
        layer = [child for parent in layer for child in _children(parent) if isinstance(child, (dict, list))]
        largest = max((len(child) for child in layer if isinstance(child, dict)), default=0)
        if largest > MAX_KEYS:
            raise TooLarge(f"An object in the request body has {largest} keys (limit {MAX_KEYS}). Remove some.")
        if not layer:
            return
    raise RequestError(f"The request body is nested more than {MAX_NESTING} levels deep. Flatten it.")


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _as_request_error(error: ValidationError, cls: type[Body]) -> RequestError:
    details = error.errors(include_url=False)
    messages = [_message(detail, cls) for detail in details[:_MAX_ERRORS]]
    if len(details) > _MAX_ERRORS:
        messages.append(f"and {len(details) - _MAX_ERRORS} more")
    return RequestError("; ".join(messages) + ".", param=_param(details[0]))


def _param(detail: ErrorDetails) -> str | None:
    # A validator of several fields has no location of its own. Its type names the field to change.
    return _path(location(detail)) or detail["type"]


def location(detail: ErrorDetails) -> tuple[int | str, ...]:
    """Keys and indices that lead to what is wrong."""
    return (*detail["loc"], *detail["ctx"]["at"]) if detail["type"] == LIST_ENTRY else detail["loc"]


def _message(detail: ErrorDetails, cls: type[Body]) -> str:
    path = _path(location(detail))
    if detail["type"] == "extra_forbidden":
        return _unknown_field(path, cls)
    if detail["type"] == "missing":
        return f"`{path}` is required"
    text = detail["msg"][0].lower() + detail["msg"][1:]
    wrong = detail["input"]
    if isinstance(wrong, dict):  # An object of no kind: `by_field` names the field that says the kind.
        wrong = wrong.get(detail["type"])
    return f"`{path}`: {text}{_echo(wrong)}" if path else text


def _unknown_field(path: str, cls: type[Body]) -> str:
    name = path.rpartition(".")[2]
    if name in UNSUPPORTED or name in MESSAGE_UNSUPPORTED:
        why = UNSUPPORTED_BECAUSE.get(name)
        return f"`{path}` is not supported with the value given" + (f": {why}" if why else "")
    near = difflib.get_close_matches(path, cls.model_fields, n=1)
    return f"Unknown field `{path}`" + (f" (did you mean `{near[0]}`?)" if near else "")


def _echo(value: object) -> str:
    """Short values only: a long text does not help, and does not belong in the logs of clients."""
    if isinstance(value, (bool, int, float)):
        return f" (got {str(value)[:MAX_ECHO]})"
    if isinstance(value, str) and 0 < len(value) <= MAX_ECHO:
        return f" (got {value!r})"
    return ""


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`."""
    path = ""
    for key in location:
        if isinstance(key, str) and key.startswith(TAG_MARK):
            continue
        path += f"[{key}]" if isinstance(key, int) else f".{key[:MAX_ECHO]}" if path else key[:MAX_ECHO]
    return path
