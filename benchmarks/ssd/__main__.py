"""`python -m benchmarks.ssd`"""

import sys

from benchmarks.ssd.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
