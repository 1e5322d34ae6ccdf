"""The demo of the README, `groupgrad demo`; its code is in `groupgrad/apps/demo`."""

import sys

from groupgrad.apps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
