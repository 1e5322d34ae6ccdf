"""What chat templates do with tools, found out by trying, and calls read back from sampled turns."""

from groupgrad.chat.format import ChatFormat
from groupgrad.chat.plain import PlainFormat
from groupgrad.chat.records import Call, Turn

__all__ = ["Call", "ChatFormat", "PlainFormat", "Turn"]
