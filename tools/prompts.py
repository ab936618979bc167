"""Prompts as token ids: chats on real text, and long prompts that share nothing."""

from __future__ import annotations

import random
from pathlib import Path

from tools.serving import REPOSITORY

HANDBOOK = REPOSITORY / "examples" / "demo" / "system_prompt.txt"


class Prompts:
    """Encodes text with a model's tokenizer."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._handbook = HANDBOOK.read_text()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def chat(self, question: str) -> list[int]:
        """The handbook as system prompt and a question, as SmolLM2's chat template has it."""
        return self.encode(
            f"<|im_start|>system\n{self._handbook}<|im_end|>\n"
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )

    def unique(self, number: int, tokens: int) -> list[int]:
        """A prompt of exactly so many tokens of real text that shares no block with that of another number."""
        text = f"Copy {number} of the handbook.\n{self._handbook}"
        ids: list[int] = []
        while len(ids) < tokens:
            ids += self.encode(text)
        return ids[:tokens]


def random_prompt(seed: int, tokens: int, *, vocabulary: int = 49_000) -> list[int]:
    """Random token ids, the same for a seed everywhere; special tokens are left out."""
    chosen = random.Random(seed)
    return [chosen.randrange(100, vocabulary) for _ in range(tokens)]
