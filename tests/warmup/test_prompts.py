"""What people have as prompts is read as what they mean; what can't be read is named by file and line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsnap.errors import ConfigError, NotFoundError
from kvsnap.warmup.prompts import CHAT, COMPLETIONS, Prompt, read_prompts

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def read(tmp_path: Path, *lines: Any, name: str = "p.jsonl", **options: Any) -> list[Prompt]:
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return read_prompts([str(path)], **options)[0]


def test_forms(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {"prompt": "a text"},
        "",
        {"messages": MESSAGES, "tools": TOOLS, "id": 7},
        {"token_ids": [1, 2, 3]},
        {"prompt": [4, 5]},
        {"prompt": ["one", "two"]},
    )

    assert [(p.url, dict(p.body)) for p in found] == [
        (COMPLETIONS, {"prompt": "a text"}),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": [4, 5]}),
        (COMPLETIONS, {"prompt": "one"}),
        (COMPLETIONS, {"prompt": "two"}),
    ]
    assert [p.source.rpartition(":")[2] for p in found] == ["1", "3", "4", "5", "6", "6"]
    assert (found[1].name, found[2].token_ids) == ("7", [1, 2, 3])


def test_openai_batch_lines(tmp_path: Path) -> None:
    """What decides the tokens stays, what decides the answer goes."""
    body = {
        "model": "m",
        "messages": MESSAGES,
        "chat_template_kwargs": {"thinking": False},
        "max_tokens": 9,
        "top_p": 0.1,
    }
    line = {"custom_id": "req-1", "method": "POST", "url": "/v1/chat/completions", "body": body}

    (found,) = read(tmp_path, line)

    assert (found.url, found.model, found.name) == (CHAT, "m", "req-1")
    assert dict(found.body) == {"messages": MESSAGES, "chat_template_kwargs": {"thinking": False}}


def test_what_a_template_may_write_goes_along(tmp_path: Path) -> None:
    """vLLM hands the response format and the documents to the renderer; Kimi K3's writes the former into the prompt."""
    fields = {"documents": [{"text": "x"}], "response_format": {"type": "json_object"}, "tool_choice": "required"}

    (found,) = read(tmp_path, {"messages": MESSAGES, "cache_salt": "s", "tools": TOOLS, **fields})

    assert found.beyond_tokenize == fields


def test_text_file_is_one_prompt(tmp_path: Path) -> None:
    (plain,) = read(tmp_path, "first line", "", '{"third": "line"}', name="system.txt")
    (chat,) = read(tmp_path, "first line", name="system.txt", text_as="system")

    assert plain.body["prompt"] == 'first line\n\n{"third": "line"}\n'
    assert chat.body == {"messages": [{"role": "system", "content": "first line\n"}], "add_generation_prompt": False}


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "p"}\n{"prompt": "p"}\n')))

    found, num_equal = read_prompts(["-"])

    assert ([p.source for p in found], num_equal) == (["<stdin>:1"], 1)


def test_equal_prompts_count_once(tmp_path: Path) -> None:
    lines = [{"messages": MESSAGES, "temperature": t, "id": f"n{t}"} for t in (0, 1)]

    assert len(read(tmp_path, *lines, {"tools": [], "messages": MESSAGES})) == 2


def test_unescaped_line_separators_stay_in_their_line(tmp_path: Path) -> None:
    (found,) = read(tmp_path, '{"prompt": "a\u2028b\u0085c"}')

    assert found.body["prompt"] == "a\u2028b\u0085c"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "expected one JSON object, found {not json"),
        ("[1, 2]", "expected one JSON object, found a list"),
        ({"mesages": MESSAGES}, "found keys mesages"),
        ({"prompt": "x", "messages": MESSAGES}, 'found "prompt" and "messages"'),
        ({"prompt": ""}, "found an empty one"),
        ({"prompt": 5}, 'as "prompt", found a number'),
        ({"token_ids": []}, 'expected a list of token ids as "token_ids", found an empty list'),
        ({"token_ids": [1, -1]}, "found -1 at position 1"),
        ({"token_ids": [1, True]}, "found true at position 1"),
        ({"messages": "hello"}, 'expected a list of messages as "messages", found a string'),
        ({"messages": [{"content": "x"}]}, 'expected an object with a "role" as message 0'),
        ({"messages": MESSAGES, "tools": {}}, 'expected a list as "tools", found an object'),
        ({"url": "/v1/embeddings", "body": {"input": "x"}}, 'expected "url" /v1/chat/completions or /v1/completions'),
        (
            {"url": "/v1/completions", "body": {"messages": MESSAGES}},
            'expected a body with "prompt" for /v1/completions',
        ),
        ({"url": CHAT, "method": "GET", "body": {"messages": MESSAGES}}, 'expected "method" POST, found GET'),
        ({"body": "x"}, 'expected an object as "body", found a string'),
        ({"prompt": "x", "cache_salt": 5}, 'expected a string as "cache_salt"'),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {"prompt": "good"}, line)

    assert f"{tmp_path / 'p.jsonl'}:2: " in str(caught.value)
    assert words in str(caught.value)


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')

    with pytest.raises(ConfigError, match=r"p\.jsonl:2: expected UTF-8, found byte 0xff"):
        read_prompts([str(path)])


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no file"):
        read_prompts([str(tmp_path / "none.jsonl")])
    with pytest.raises(ConfigError, match="there is no prompt in"):
        read(tmp_path, "")
    with pytest.raises(ConfigError, match="is empty"):
        read(tmp_path, "", name="empty.txt")
