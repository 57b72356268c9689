"""`python -m te_plugin` is `te-plugin`."""

import sys

from te_plugin.cli import main

if __name__ == "__main__":
    sys.exit(main())
