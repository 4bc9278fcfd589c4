"""`python -m whet`: the same as the `whet` command."""

import sys

from whet.app.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
