"""The error tree."""

from __future__ import annotations

from kvsnap.errors import ConfigError, IncompatibleError, KvsnapError, NotFoundError


def test_not_found_prints_plainly() -> None:
    """A KeyError would print the repr of the message, quotes included."""
    error = NotFoundError("no ref named 'prod'")

    assert str(error) == "no ref named 'prod'"
    assert isinstance(error, KeyError)
    assert isinstance(error, KvsnapError)


def test_incompatible_names_fields() -> None:
    error = IncompatibleError("kv_dtype is fp8_e4m3, this engine has bfloat16", ("kv_dtype",))

    assert error.fields == ("kv_dtype",)
    assert str(error) == "kv_dtype is fp8_e4m3, this engine has bfloat16"


def test_config_error_is_a_value_error() -> None:
    assert isinstance(ConfigError("x"), ValueError)
