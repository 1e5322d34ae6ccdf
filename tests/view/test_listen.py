"""Addresses at which `groupgrad view` listens."""

from __future__ import annotations

import socket

import pytest

from groupgrad.apps.cli.view import _listen


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_any_address_is_one_of_ipv4_too() -> None:
    with _listen("::", 0) as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5).close()


def test_a_port_that_is_taken_is_named_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"at 127\.0\.0\.1: .*Address already in use.*{port}.*; set --host"):
            _listen("127.0.0.1", port)
