"""The fixed pieces of a call syntax: found by comparing renderings, matched with any white space between them."""

from __future__ import annotations

import re
from collections.abc import Callable

from groupgrad.chat.records import Region

_PIECES = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]|\w+|\s+|.", re.DOTALL)


def loose(literal: str) -> str:
    """A pattern that matches the literal with any amount of white space, none too, where it has some or at its ends."""
    parts = [re.escape(part) for part in literal.split()]
    return r"\s*" + r"\s*".join(parts) + (r"\s*" if parts else "")


def tight(literal: str) -> str:
    """As `loose`, without white space at the ends."""
    return r"\s*".join(re.escape(part) for part in literal.split())


def common_suffix(first: str, second: str) -> str:
    """The longest common ending that cuts no tag or word in two."""
    ours, theirs = _PIECES.findall(first), _PIECES.findall(second)
    count = 0
    while count < min(len(ours), len(theirs)) and ours[-1 - count] == theirs[-1 - count]:
        count += 1
    return "".join(ours[len(ours) - count :])


def opened_regions(text: str, opening: re.Pattern[str], region_of: Callable[[str, int, int], Region]) -> list[Region]:
    """What `region_of(text, start, end)` makes of each `opening` that no region before it contains, in order."""
    regions: list[Region] = []
    at = 0
    while found := opening.search(text, at):
        region = region_of(text, found.start(), found.end())
        regions.append(region)
        at = max(region.end, found.end())
    return regions


def widened(text: str, regions: list[Region], opening: str, closing: str) -> list[Region]:
    """Regions that take in what stands around all calls of a message: `opening` before a first one and `closing`
    behind a last one."""
    for region in regions:
        if opening:
            before = re.search(tight(opening) + r"\s*\Z", text[: region.start])
            if before:
                region.start = before.start()
        if closing:
            behind = re.compile(r"\s*" + tight(closing)).match(text, region.end)
            if behind:
                region.end = behind.end()
    return regions
