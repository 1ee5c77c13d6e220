"""The rotary position embedding of a model, read from the old (`rope_scaling`) or new (`rope_parameters`) fields."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_DEFAULT_THETA = 10_000.0
#: Far above any real context.
_MAX_LENGTH = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotation; those that the type does not use keep their defaults.

    Source: linear and dynamic NTK scaling (kaiokendev, bloc97, emozilla); YaRN (arXiv:2309.00071); LongRoPE
    (arXiv:2402.13753); llama3 is the scaling published with Llama 3.1.
    """

    rope_type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    #: Maximum length of the model before its context was extended.
    original_max_position_embeddings: int = 0
    #: Factor of cos and sin; None: computed from `factor` as in the paper (yarn, longrope).
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: Divisors of the head_dim / 2 frequencies, for maximum lengths up to the original one, and beyond.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def rope_from_hf(config: Fields, *, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """The rope config of a model. Raises `SetupError` that names an unsupported type or parameter."""
    rope = config.object("rope_scaling" if config.raw("rope_scaling") else "rope_parameters")
    if any(isinstance(rope.raw(name), dict) for name in rope.names()):
        raise SetupError(f"{rope.where}: parameters per layer type are not supported; supported: one set for all.")
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise SetupError(f"{rope.where}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}.")
    for fields in (rope, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise SetupError(
                f"{fields.where}: partial_rotary_factor {fields.raw('partial_rotary_factor')} is not supported; "
                "supported: 1."
            )
    theta = rope.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    # Some checkpoints have the original length outside the rope parameters. It takes precedence, as in transformers.
    original = config.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_position_embeddings)
    )
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type in ("linear", "dynamic"):
        factor = _extending(rope, rope.number("factor"), max_position_embeddings)
        return RopeConfig(rope_type=rope_type, theta=theta, factor=factor)
    if rope_type == "llama3":
        return _llama3(rope, theta, original)
    if rope_type == "yarn":
        return _yarn(rope, theta, original, max_position_embeddings)
    return _longrope(rope, theta, original, max_position_embeddings, head_dim)


def _llama3(rope: Fields, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.wrong("high_freq_factor", "greater than low_freq_factor")
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Fields, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    if theta == 1.0:
        raise SetupError(f"{rope.where}: rope_theta is 1, with which no frequency differs; yarn needs another one.")
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=_extending(rope, rope.number("factor", max_position_embeddings / original), original),
        original_max_position_embeddings=original,
        attention_factor=_optional(rope, "attention_factor"),
        # Absent and 0 both mean the paper's value.
        beta_fast=rope.number("beta_fast", 32.0) if rope.raw("beta_fast") else 32.0,
        beta_slow=rope.number("beta_slow", 1.0) if rope.raw("beta_slow") else 1.0,
        truncate=rope.flag("truncate", True),
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
    )


def _longrope(rope: Fields, theta: float, original: int, max_position_embeddings: int, head_dim: int) -> RopeConfig:
    return RopeConfig(
        rope_type="longrope",
        theta=theta,
        factor=rope.number("factor", max_position_embeddings / original),
        original_max_position_embeddings=original,
        attention_factor=_optional(rope, "attention_factor"),
        short_factor=rope.numbers("short_factor", head_dim // 2),
        long_factor=rope.numbers("long_factor", head_dim // 2),
    )


def _extending(rope: Fields, factor: float, length: int) -> float:
    """The factor by which a scaling extends a length. Raises `SetupError` for one that makes no length."""
    if factor * length > _MAX_LENGTH:
        raise rope.wrong("factor", f"at most {_MAX_LENGTH // length}, since it extends {length} tokens")
    return factor


def _optional(rope: Fields, name: str) -> float | None:
    # 0 means absent in checkpoints derived from DeepSeek (mscale).
    return rope.number(name) if rope.raw(name) else None
