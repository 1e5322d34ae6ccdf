"""`groupgrad env`: versions and devices of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from groupgrad import compat


def main(argv: Sequence[str]) -> int:
    """Print one line for each library and device, then what is out of its supported range; returns 0."""
    parser = argparse.ArgumentParser(prog="groupgrad env", description="Print versions and devices, for a bug report.")
    parser.parse_args(argv)
    report = compat.environment()
    width = max(len(name) for name in report)
    for name, value in report.items():
        print(f"{name:<{width}}  {value}")
    for text in compat.unsupported_versions():
        print(f"warning: {text}")
    return 0
