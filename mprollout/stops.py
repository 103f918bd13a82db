"""Where a stop string lies among tokens: an engine looks for it within one request, a turn may consist of several.

Text is decoded with special tokens, as the engine does it. A token has at least one byte, so a stop string of L bytes lies in the last L
tokens, or begins in the middle of a character of the few before them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mprollout.generator import Tokenizer

_CHARACTER = 4
"""Longest UTF-8 character, in bytes."""


def window(stops: Sequence[str]) -> int:
    """Most tokens that one of the stop strings touches."""
    return max((len(stop.encode()) for stop in stops), default=0) + _CHARACTER


def first_stop(
    tokenizer: Tokenizer, token_ids: Sequence[int], stops: Sequence[str], since: int, until: int
) -> tuple[int, str] | None:
    """The least n in (since, until] such that the first n tokens end with a stop string, and which one; None: there is none."""
    wide = window(stops)
    for n in range(since + 1, until + 1):
        text = tokenizer.decode(token_ids[max(0, n - wide) : n], special=True)
        for stop in stops:
            if stop in text:
                return n, stop
    return None


def tokens_before(tokenizer: Tokenizer, token_ids: Sequence[int], stop: str) -> int:
    """How many tokens come before the first that has something of the stop string with which they end; all, if they do not end with it."""
    n = len(token_ids)
    for k in range(n - 1, max(-1, n - 1 - window([stop])), -1):
        if stop in tokenizer.decode(token_ids[k:], special=True):
            return k
    return n
