"""Settings come from flags, environment and file in that order, and mistakes are named."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.base.config import (
    add_options,
    from_arguments,
    option,
    option_fields,
    repeated_option,
    words_option,
)
from pdserve.base.errors import SetupError
from pdserve.base.option_values import parse_bytes, parse_ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    model: str = option(help="a model")
    port: int = option(8000, help="a port", minimum=0)
    memory: int | None = option(None, help="a size", parse=parse_bytes)
    cpus: tuple[int, ...] = option((), help="cores", parse=parse_ints)
    level: str = option("info", help="a level", choices=("info", "debug"))
    fast: bool = option(False, help="a switch")
    lease_s: float = option(1.0, help="a time")
    colours: tuple[str, ...] = words_option((), help="words", parse=lambda text: tuple(text.split()))


def _load(*argv: str, **environment: str) -> _Config:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, _Config)
    return from_arguments(_Config, "router_svc", parser.parse_args(argv), environment)


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('model = "file"\nport = 1\nlease-s = 2\nmemory = "2GiB"\n')
    config = _load("--config", str(file), "--model", "flag", PDSERVE_ROUTER__PORT="7", PDSERVE_ROUTER__MODEL="env")
    assert config == _Config(model="flag", port=7, lease_s=2.0, memory=2 * 1024**3)


def test_values_are_parsed_by_type() -> None:
    config = _load("--model", "m", "--cpus", "0,2-3", "--fast", "--memory", "512MiB")
    assert (config.cpus, config.fast, config.memory) == ((0, 2, 3), True, 512 * 1024**2)
    assert _load(PDSERVE_ROUTER__MODEL="m", PDSERVE_ROUTER__FAST="true").fast


@pytest.mark.parametrize(
    ("argv", "environment", "needle"),
    [
        ((), {}, "--model is required: a model. Set it there, as PDSERVE_ROUTER__MODEL, or in the config file"),
        (("--model", "m", "--port", "x"), {}, "--port: 'x' is not a whole number"),
        (("--model", "m", "--port", "-1"), {}, "--port is -1, but must be at least 0"),
        (("--model", "m", "--level", "loud"), {}, "--level is 'loud', but must be one of info, debug"),
        (("--model", "m", "--memory", "2 bananas"), {}, "write, for example, 2GiB"),
        (("--model", "m"), {"PDSERVE_ROUTER__PROT": "1"}, "Did you mean 'port'"),
        (("--model", "m", "--config", "/nowhere.toml"), {}, "No such file"),
        (("--model", "m"), {"PDSERVE_ROUTER__FAST": "perhaps"}, "PDSERVE_ROUTER__FAST"),
    ],
)
def test_a_mistake_is_named_with_its_source(argv: tuple[str, ...], environment: dict[str, str], needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        _load(*argv, **environment)


@pytest.mark.parametrize("content", ["prot = 1", "port = 'x'", "port = true", "port = [", "cpus = 3"])
def test_a_wrong_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'model = "m"\n{content}\n')
    with pytest.raises(SetupError):
        _load("--config", str(file))


def test_names_that_kubernetes_makes_for_services_are_not_settings() -> None:
    assert _load("--model", "m", PDSERVE_ROUTER_PORT="tcp://10.0.0.1:80").port == 8000


def test_a_flag_of_several_words_ends_at_the_next_flag() -> None:
    assert _load("--colours", "red", "green", "--model", "m").colours == ("red", "green")
    assert _load("--model", "m", PDSERVE_ROUTER__COLOURS="red green").colours == ("red", "green")


def test_a_command_of_two_words_has_an_underscore_in_its_variables() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, _Config)
    environment = {"PDSERVE_BENCH_SERVE__MODEL": "m"}
    assert from_arguments(_Config, "bench serve", parser.parse_args([]), environment).model == "m"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeated:
    model: tuple[str, ...] = repeated_option(help="models")
    alias: tuple[str, ...] = repeated_option((), help="aliases")


def test_a_flag_may_be_given_several_times(tmp_path: Path) -> None:
    """A value is a whole line, so that it may have spaces and commas."""

    def load(*argv: str, **environment: str) -> _Repeated:
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_options(parser, _Repeated)
        return from_arguments(_Repeated, "router_svc", parser.parse_args(argv), environment)

    assert load("--model", "/my models/a,b", "--model=c").model == ("/my models/a,b", "c")
    assert load("--model", "a").alias == ()
    assert load(PDSERVE_ROUTER__MODEL="/my models/a\n\n c \n", PDSERVE_ROUTER__ALIAS="x=c").model == (
        "/my models/a",
        "c",
    )
    file = tmp_path / "c.toml"
    file.write_text('model = ["a", "b"]\nalias = "x=a"\n')
    assert load("--config", str(file)) == _Repeated(model=("a", "b"), alias=("x=a",))
    assert load("--config", str(file), "--model", "z").model == ("z",)
    with pytest.raises(SetupError, match="--model is required"):
        load()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derived(_Config):
    extra: str = option("", help="one more")


def test_settings_are_shown_before_those_of_their_base_class() -> None:
    names = [field.name for field in option_fields(_Derived)]
    assert names == ["extra", *(field.name for field in option_fields(_Config))]
