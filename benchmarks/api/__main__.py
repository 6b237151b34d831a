"""`python -m benchmarks.api`"""

import sys

from benchmarks.api.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
