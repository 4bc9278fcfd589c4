"""`python -m whet.agl`: the `agl` command."""

import sys

from whet.agl.cli import main

sys.exit(main())
