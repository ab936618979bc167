r"""The metadata value of a shard: canonical JSON with its own checksum, and one row per chunk.

It is read as it stands in the header, where every quote has a backslash before it, by patterns that match its one
canonical form. That is stricter than a JSON parser (no key twice, no other order, no white space, no 1.0 for 1) and
several times faster; the start-up scan depends on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import xxhash

from kvsnap.errors import CorruptChunkError, IncompatibleError
from kvsnap.keys import BLOCK_KEY_BYTES, KEY_SCHEME
from kvsnap.namespace import FORMAT

CODEC_RAW = "raw"
SCOPE = re.compile(r"(?!,)(?:lora:[0-9a-f]+)?(?:(?:^|,)mm)?(?:(?:^|,)salted)?")
"""`lora:<hex>`, `mm`, `salted`: those that apply, in this order, joined by commas; empty is plain."""


def _pattern(text: str) -> re.Pattern[str]:
    """Compile, with each quote standing for an escaped one, HASH, INT and TEXT for what they say."""
    text = text.replace('"', r"\\" + '"').replace("HASH", r"([^\\]{64})").replace("INT", r"(0|[1-9][0-9]{0,9})")
    return re.compile(text.replace("TEXT", r"([^\\]*)"))


_HEAD = _pattern(r'\{"check":"([^\\]{32})","chunk_tokens":INT,"chunks":\[')
_ROW = _pattern(
    r'\{"block_keys":"TEXT","depth":INT,"key":"HASH","parent":"HASH","tokens":INT,"xxh3":"([^\\]{32})"\}(?:,(?=\{)|$)'
)
_TAIL = _pattern(
    r'\],"codec":"TEXT","format":INT,"identity":"HASH","key_scheme":"TEXT","layout":"HASH","scope":"TEXT"\}'
)
_TAIL_START = r"],\"codec\":\""
_ROW_BYTES = len(r"{\"block_keys\":\"\",\"depth\":,\"key\":\"\",\"parent\":\"\",\"tokens\":,\"xxh3\":\"\"},") + 160
_CHECK_END = len('{"check":"",') + 32
_NO_BACKSLASH = str.maketrans({"\\": None})

Row = tuple[str, str, str, str, str, str]
"""Block keys, depth, key, parent, tokens, xxh3; as they stand there."""


class Metadata(NamedTuple):
    """A metadata value whose form, check and fields are right; its rows aren't checked yet."""

    fields: dict[str, Any]
    """The fields of the namespace, as `Namespace.hashed_fields` gives them."""
    scope: str
    rows: list[Row]


def render_metadata(fields: Mapping[str, Any], scope: str, rows: str) -> str:
    """The metadata value in canonical JSON; `rows` are the rendered rows, joined by commas."""
    body = (
        f'"chunk_tokens":{fields["chunk_tokens"]},"chunks":[{rows}],"codec":"{CODEC_RAW}",'
        f'"format":{fields["format"]},"identity":"{fields["identity"]}","key_scheme":"{fields["key_scheme"]}",'
        f'"layout":"{fields["layout"]}","scope":"{scope}"}}'
    )
    return f'{{"check":"{_digest("{" + body)}",{body}'


def render_row(key: str, parent: str, depth: int, tokens: int, xxh3: str, block_keys: str) -> str:
    """One chunk's row in canonical JSON."""
    return (
        f'{{"block_keys":"{block_keys}","depth":{depth},"key":"{key}","parent":"{parent}",'
        f'"tokens":{tokens},"xxh3":"{xxh3}"}}'
    )


def parse_metadata(escaped: str, expect: Mapping[str, Any] | None) -> Metadata:
    """Check everything about a metadata value but its rows.

    Args:
        escaped: The value with a backslash before every quote, and no other backslash.
        expect: What `Namespace.hashed_fields` gives; None takes any namespace.

    Raises:
        CorruptChunkError: it isn't in its canonical form, or the check is wrong.
        IncompatibleError: another namespace, format or codec.
    """
    head = _HEAD.match(escaped)
    tail_start = escaped.rfind(_TAIL_START)
    tail = _TAIL.fullmatch(escaped, tail_start) if tail_start > 0 else None
    if head is None or tail is None:
        raise _why_not_canonical(escaped)
    plain = escaped.encode("ascii").translate(None, b"\\")
    computed = xxhash.xxh3_128_hexdigest(b"{" + plain[_CHECK_END:])
    if head[1] != computed:
        raise CorruptChunkError(f"its metadata has check {head[1][:12]}, read {computed[:12]}")
    codec, version, identity, key_scheme, layout, scope = tail.groups()
    fields = {
        "chunk_tokens": int(head[2]),
        "format": int(version),
        "identity": identity,
        "key_scheme": key_scheme,
        "layout": layout,
    }
    _check_fields(fields, codec, scope, expect)
    rows: list[Row] = _ROW.findall(escaped, head.end(), tail_start)
    digits = sum([len(row[0]) + len(row[1]) + len(row[4]) for row in rows])
    if len(rows) * _ROW_BYTES + digits - bool(rows) != tail_start - head.end():
        raise CorruptChunkError(f"its metadata is not canonical JSON: {len(rows)} of its chunks can be read")
    return Metadata(fields, scope, rows)


def _check_fields(fields: dict[str, Any], codec: str, scope: str, expect: Mapping[str, Any] | None) -> None:
    if fields["format"] != FORMAT:
        raise _other_format(fields["format"])
    if codec != CODEC_RAW:
        raise IncompatibleError(f"it has codec {codec:.40}, this kvsnap reads {CODEC_RAW}", ("codec",))
    if fields["key_scheme"] != KEY_SCHEME:
        raise IncompatibleError(f"it has key scheme {fields['key_scheme']:.40}, expected {KEY_SCHEME}", ("key_scheme",))
    for name in ("identity", "layout"):
        if not re.fullmatch("[0-9a-f]{64}", fields[name]):
            raise CorruptChunkError(f"its {name} is {fields[name]}, expected lower-case hex")
    if fields["chunk_tokens"] < 1:
        raise CorruptChunkError("its chunk_tokens is 0, expected 1 or more")
    if not SCOPE.fullmatch(scope):
        raise CorruptChunkError(f"its scope is {scope!r:.80}, expected those of lora:<hex>, mm, salted that apply")
    if expect is not None and fields != expect:
        wrong = tuple(name for name in fields if fields[name] != expect[name])
        texts = [f"{name} is {str(fields[name])[:12]}, expected {str(expect[name])[:12]}" for name in wrong]
        raise IncompatibleError("; ".join(texts), wrong)


def _why_not_canonical(escaped: str) -> CorruptChunkError | IncompatibleError:
    try:
        obj = json.loads(escaped.translate(_NO_BACKSLASH))
    except (ValueError, RecursionError) as error:
        return CorruptChunkError(f"its metadata is not JSON: {error}")
    version = obj.get("format") if isinstance(obj, dict) else None
    if type(version) is int and version > FORMAT:
        return _other_format(version)
    return CorruptChunkError("its metadata is not canonical JSON with exactly the fields of a shard")


def _other_format(version: int) -> IncompatibleError:
    hint = "; upgrade kvsnap" if version > FORMAT else ""
    return IncompatibleError(f"it has format version {version}, this kvsnap reads {FORMAT}{hint}", ("format",))


class RowCheck:
    """Checks the rows of one shard, one after the other, against each other."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._seen: dict[bytes, tuple[int, int]] = {}
        self._parents_elsewhere: set[bytes] = set()

    def add(self, row: Row, depth: int, tokens: int, blocks: int) -> tuple[bytes, bytes, bytes, bytes]:
        """Check one row, parsed to `depth` and `tokens`. Returns key, parent, xxh3 and block keys as bytes.

        Raises:
            CorruptChunkError
        """
        digits = row[2] + row[3] + row[5] + row[0]
        try:
            raw = bytes.fromhex(digits)
        except ValueError:
            raw = b""
        if raw.hex() != digits:  # capitals, and the white space that fromhex skips
            raise CorruptChunkError(f"chunk {row[2][:12]!r} has hashes that are not lower-case hex")
        if len(raw) != 80 + BLOCK_KEY_BYTES * blocks:
            found = (len(raw) - 80) / BLOCK_KEY_BYTES
            raise CorruptChunkError(f"chunk {row[2][:12]} has {found:g} block keys, expected {blocks}")
        if not 0 < tokens <= self._chunk_tokens:
            raise CorruptChunkError(f"chunk {row[2][:12]} has {tokens} tokens, expected 1 to {self._chunk_tokens}")
        key, parent = raw[:32], raw[32:64]
        above = self._seen.get(parent)
        if above is None:
            self._parents_elsewhere.add(parent)
        elif depth != above[0] + 1 or above[1] != self._chunk_tokens:
            raise CorruptChunkError(
                f"chunk {row[2][:12]} at depth {depth} can't follow {row[3][:12]} at depth {above[0]}"
                f" with {above[1]} tokens"
            )
        if key in self._seen:
            raise CorruptChunkError(f"chunk {row[2][:12]} is there twice")
        self._seen[key] = (depth, tokens)
        return key, parent, raw[64:80], raw[80:]

    def finish(self) -> None:
        """Once all rows were added: no parent comes after its child."""
        if late := self._parents_elsewhere & self._seen.keys():
            raise CorruptChunkError(f"chunk {min(late).hex()[:12]} comes after a chunk that follows it")


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode("ascii"))
