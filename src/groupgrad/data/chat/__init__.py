"""What chat templates do with tools, found out by trying, and calls read back from sampled turns."""

from groupgrad.data.chat.format import ChatFormat
from groupgrad.data.chat.plain import PlainFormat
from groupgrad.data.chat.records import Call, Turn

__all__ = ["Call", "ChatFormat", "PlainFormat", "Turn"]
