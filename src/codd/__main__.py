"""``python -m codd``: the command line without the installed script."""

import sys

from codd.cli import main

sys.exit(main())
