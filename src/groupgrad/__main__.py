"""`python -m groupgrad`, the same as the command `groupgrad`."""

import sys

from groupgrad.cli.main import main

sys.exit(main())
