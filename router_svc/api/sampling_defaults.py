"""What a model's files say of how its tokens are chosen, for requests that do not say it themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from pdserve.base.errors import SetupError
from pdserve.base.sampling import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from pdserve.model.known_fields import generation_fields

#: Far above any real default, and within the fields of a request to a worker.
_MAX_INTEGER = 2**31 - 1
_MAX_STOPS, _MAX_STOP_CHARACTERS = 64, 1024
_Stop = Annotated[str, MinLen(1), MaxLen(_MAX_STOP_CHARACTERS)]


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


class SamplingDefaults(BaseModel):
    """Fields of generation_config.json that apply to requests which omit them, as in vLLM; the last two besides."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    temperature: Annotated[float, Ge(0), Le(MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1), Le(_MAX_INTEGER)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Ge(MIN_REPETITION_PENALTY), Le(MAX_REPETITION_PENALTY)] | None = None
    #: Also the upper limit for requests, as in vLLM.
    max_new_tokens: Annotated[int, Ge(1), Le(_MAX_INTEGER)] | None = None
    #: For requests without `min_tokens` and `stop`.
    min_new_tokens: Annotated[int, Ge(0), Le(_MAX_INTEGER)] | None = None
    stop_strings: Annotated[tuple[_Stop, ...], MaxLen(_MAX_STOPS), BeforeValidator(_one_or_more)] | None = None

    @classmethod
    def from_dir(cls, model_dir: Path) -> SamplingDefaults:
        """The defaults of generation_config.json, or of config.json where the model has none. Raises `SetupError`."""
        config = generation_fields(model_dir)
        try:
            return cls.model_validate({name: config.raw(name) for name in cls.model_fields})
        except ValidationError as error:
            problems = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors(include_url=False))
            raise SetupError(f"{config.where} is invalid: {problems}.") from error
