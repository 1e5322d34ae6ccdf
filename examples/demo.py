"""The demo of the README, `groupgrad demo`; its code is in `groupgrad/demo`."""

import sys

from groupgrad.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
