"""Readers of warm-up prompts.

JSON lines, one object each, in the forms that people have already:

    {"prompt": "text"}                       a completion; also a list of texts, or token ids
    {"messages": [...], "tools": [...]}      a chat
    {"token_ids": [1, 2, 3]}                 exactly these tokens
    {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}     OpenAI batch

Anything else is one prompt per file, as it stands. Fields that only say what is generated (max_tokens,
temperature, ...) are dropped; the rest goes along, since it may decide how the prompt is rendered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvsnap.errors import ConfigError, NotFoundError

InputFormat = Literal["auto", "jsonl", "text"]
TextAs = Literal["prompt", "system", "user"]
INPUT_FORMATS: tuple[InputFormat, ...] = ("auto", "jsonl", "text")
TEXT_AS: tuple[TextAs, ...] = ("prompt", "system", "user")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSONL_SUFFIXES = {".jsonl", ".ndjson", ".json"}
MAX_TOKEN_ID = 2**32 - 1

_FORMS = '"prompt", "messages", "token_ids", or an OpenAI batch line with "url" and "body"'
_CONTENT = ("prompt", "messages", "token_ids")
_NAMES = ("custom_id", "id", "name")
_DROPPED = frozenset(
    (
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "echo",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "kv_transfer_params",
        "length_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "priority",
        "prompt_logprobs",
        "repetition_penalty",
        "request_id",
        "return_token_ids",
        "seed",
        "service_tier",
        "session_id",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "store",
        "stream",
        "stream_options",
        "structured_outputs",
        "suffix",
        "temperature",
        "top_k",
        "top_logprobs",
        "top_p",
        "use_beam_search",
        "user",
    )
)
"""Fields that decide what is generated or how it is answered, not what the prompt's tokens are."""

TOKENIZE_FIELDS = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "tools",
)
"""What /tokenize knows of a request, beside its content (vLLM 0.32, `TokenizeChatRequest`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt to warm up."""

    source: str
    """Where it was read: `file:line`, for people."""
    url: str
    """The endpoint that it is for: COMPLETIONS or CHAT."""
    body: Mapping[str, Any]
    """Fields of the request that decide its tokens."""
    model: str | None = None
    """The model that it asks for by name, if it does."""
    name: str | None = None
    """Its own name (`custom_id`)."""

    @property
    def token_ids(self) -> list[int] | None:
        """The token ids, where it was given as such."""
        prompt = self.body.get("prompt")
        return list(prompt) if isinstance(prompt, list) else None

    @property
    def salt(self) -> str | None:
        """The `cache_salt`."""
        salt = self.body.get("cache_salt")
        return str(salt) if salt is not None else None

    @property
    def beyond_tokenize(self) -> dict[str, Any]:
        """Fields that may change its tokens (documents, reasoning_effort, tool_choice, ...), unknown to /tokenize."""
        told = {*TOKENIZE_FIELDS, *_CONTENT, "cache_salt"}
        return {name: value for name, value in self.body.items() if name not in told}

    @property
    def has_media(self) -> bool:
        """Whether it holds more than text, so that equal tokens don't mean an equal prompt."""
        for message in self.body.get("messages", ()):
            content = message.get("content")
            if isinstance(content, list) and any(part.get("type") not in ("text", None) for part in content):
                return True
        return False

    def key(self) -> str:
        """Equal for equal prompts."""
        return json.dumps([self.url, self.model, dict(self.body)], sort_keys=True)


def read_prompts(
    paths: Sequence[str], *, input_format: InputFormat = "auto", text_as: TextAs = "prompt"
) -> tuple[list[Prompt], int]:
    """Read all files (`-`: standard input); the prompts in order, equal ones once, and how many equal ones there were.

    Args:
        input_format: `auto` goes by the file's name, for `-` and unknown ones by the first line.
        text_as: What a plain text is: a whole prompt, or the system or user message of a chat.

    Raises:
        ConfigError: a line is none of the known forms; the message names file and line.
        NotFoundError: there is no such file.
    """
    found: dict[str, Prompt] = {}
    count = 0
    for path in paths:
        for prompt in _read_file(path, input_format, text_as):
            count += 1
            found.setdefault(prompt.key(), prompt)
    if not found:
        raise ConfigError(f"there is no prompt in {', '.join(paths) or 'no file'}")
    return list(found.values()), count - len(found)


def _read_file(path: str, input_format: InputFormat, text_as: TextAs) -> Iterator[Prompt]:
    name = "<stdin>" if path == "-" else path
    text = _read_text(path, name)
    if input_format == "jsonl" or (input_format == "auto" and _is_jsonl(path, text)):
        yield from _read_lines(text, name)
        return
    if not text.strip():
        raise ConfigError(f"{name} is empty, expected the text of a prompt")
    if text_as == "prompt":
        yield Prompt(source=name, url=COMPLETIONS, body={"prompt": text})
    else:
        # no answer begins after it: what is shared with real requests ends with the message
        body = {"messages": [{"role": text_as, "content": text}], "add_generation_prompt": False}
        yield Prompt(source=name, url=CHAT, body=body)


def _read_text(path: str, name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: expected UTF-8, found byte 0x{data[error.start]:02x}") from None


def _is_jsonl(path: str, text: str) -> bool:
    if path != "-" and Path(path).suffix.lower() in JSONL_SUFFIXES:
        return True
    if path != "-" and Path(path).suffix.lower() in (".txt", ".md"):
        return False
    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _read_lines(text: str, name: str) -> Iterator[Prompt]:
    # not splitlines(): U+2028 and its like may stand unescaped inside a JSON string
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            obj = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: expected one JSON object, found {_short(line)} ({error})") from None
        if not isinstance(obj, dict):
            raise ConfigError(f"{where}: expected one JSON object, found {_kind(obj)}")
        yield from _read_object(obj, where)


def _read_object(obj: dict[str, Any], where: str) -> Iterator[Prompt]:
    if "body" in obj:
        yield from _read_batch_line(obj, where)
        return
    own_name = next((str(obj[field]) for field in _NAMES if isinstance(obj.get(field), str | int)), None)
    yield from _read_body({k: v for k, v in obj.items() if k not in _NAMES}, where, own_name, None)


def _read_batch_line(obj: dict[str, Any], where: str) -> Iterator[Prompt]:
    body, url = obj["body"], obj.get("url", CHAT if isinstance(obj["body"], dict) and "messages" in obj["body"] else "")
    if not isinstance(body, dict):
        raise ConfigError(f'{where}: expected an object as "body", found {_kind(body)}')
    if obj.get("method", "POST") != "POST":
        raise ConfigError(f'{where}: expected "method" POST, found {_short(obj["method"])}')
    path = "/v1/" + url.partition("/v1/")[2] if isinstance(url, str) else ""
    if path not in (COMPLETIONS, CHAT):
        raise ConfigError(f'{where}: expected "url" {CHAT} or {COMPLETIONS}, found {_short(url)}')
    name = obj.get("custom_id")
    yield from _read_body(body, where, None if name is None else str(name), path)


def _read_body(body: dict[str, Any], where: str, name: str | None, url: str | None) -> Iterator[Prompt]:
    have = [field for field in _CONTENT if field in body]
    if len(have) != 1:
        found = " and ".join(f'"{field}"' for field in have) or f"keys {', '.join(map(_short, body)) or 'none'}"
        raise ConfigError(f"{where}: expected one of {_FORMS}; found {found}")
    field = have[0]
    if url is not None and (url == CHAT) != (field == "messages"):
        raise ConfigError(f'{where}: expected a body with "{"messages" if url == CHAT else "prompt"}" for {url}')
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ConfigError(f'{where}: expected a name as "model", found {_kind(model)}')
    rest = {k: v for k, v in body.items() if k not in _DROPPED and k not in _CONTENT and k != "model"}
    salt = rest.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise ConfigError(f'{where}: expected a string as "cache_salt", found {_kind(salt)}')
    if field == "messages":
        _check_messages(body["messages"], where)
        if body.get("tools") is not None and not isinstance(body["tools"], list):
            raise ConfigError(f'{where}: expected a list as "tools", found {_kind(body["tools"])}')
        contents: list[tuple[str, Any]] = [("messages", body["messages"])]
    elif field == "token_ids":
        contents = [("prompt", _checked_ids(body[field], where, field))]
    else:
        contents = [("prompt", item) for item in _split(body[field], where)]
    for key, value in contents:
        yield Prompt(
            source=where,
            url=CHAT if key == "messages" else COMPLETIONS,
            body={key: value, **rest},
            model=model,
            name=name,
        )


def _split(value: Any, where: str) -> Iterable[str | list[int]]:
    """One request's `prompt`: a text, token ids, or a list of either."""
    if isinstance(value, str):
        if not value:
            raise ConfigError(f'{where}: expected a text as "prompt", found an empty one')
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        return [one for item in value for one in _split(item, where)]
    return [_checked_ids(value, where, "prompt")]


def _checked_ids(value: Any, where: str, field: str) -> list[int]:
    if not isinstance(value, list) or not value:
        expected = "a list of token ids" if field == "token_ids" else "a text or a list of token ids"
        raise ConfigError(f'{where}: expected {expected} as "{field}", found {_kind(value)}')
    for i, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise ConfigError(f'{where}: expected token ids as "{field}", found {_short(item)} at position {i}')
    return value


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f'{where}: expected a list of messages as "messages", found {_kind(messages)}')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f'{where}: expected an object with a "role" as message {i}, found {_short(message)}')
        content = message.get("content")
        if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
            raise ConfigError(f"{where}: expected objects as parts of message {i}, found {_short(content)}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    if value == []:
        return "an empty list"
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
