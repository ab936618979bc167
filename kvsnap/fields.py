"""Read the fields of a JSON object strictly: nothing missing, nothing unknown, no other type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvsnap.errors import IncompatibleError

Fields = Mapping[str, Any]


def check_keys(obj: object, what: str, keys: Iterable[str]) -> Fields:
    """`obj` as an object with exactly `keys`.

    Raises:
        IncompatibleError: it is no object, or `fields` of the error are missing or unknown.
    """
    if not isinstance(obj, Mapping):
        raise IncompatibleError(f"{what} is {_name(obj)}, expected an object")
    expected = set(keys)
    missing, unknown = sorted(expected - obj.keys()), sorted(map(str, obj.keys() - expected))
    if missing:
        raise IncompatibleError(f"{what} lacks {', '.join(missing)}", tuple(missing))
    if unknown:
        raise IncompatibleError(
            f"{what} has unknown {', '.join(unknown)}; it was made by another version of kvsnap", tuple(unknown)
        )
    return obj


def get_int(fields: Fields, name: str) -> int:
    """The integer `name`; a boolean is none."""
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, "an integer")
    return value


def get_str(fields: Fields, name: str) -> str:
    """The string `name`."""
    value = fields[name]
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def get_list(fields: Fields, name: str) -> list[Any]:
    """The list `name`."""
    value = fields[name]
    if not isinstance(value, list):
        raise _wrong(name, value, "a list")
    return value


def get_ints(fields: Fields, name: str) -> tuple[int, ...]:
    """The list of integers `name`."""
    values = get_list(fields, name)
    if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        raise _wrong(name, values, "a list of integers")
    return tuple(values)


def get_mapping(fields: Fields, name: str) -> Fields:
    """The object `name`."""
    value = fields[name]
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object")
    return value


def _wrong(name: str, value: object, expected: str) -> IncompatibleError:
    return IncompatibleError(f"{name} is {_name(value)} {value!r:.80}, expected {expected}", (name,))


def _name(value: object) -> str:
    return "null" if value is None else type(value).__name__
