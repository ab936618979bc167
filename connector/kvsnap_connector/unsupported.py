"""The one exception for what kvsnap stays out of."""

from __future__ import annotations


class Unsupported(Exception):
    """kvsnap can't cache this engine correctly. The text is the reason, for people."""
