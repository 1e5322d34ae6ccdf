"""`python -m groupgrad`, the same as the command `groupgrad`."""

import sys

from groupgrad.apps.cli.main import main

sys.exit(main())
