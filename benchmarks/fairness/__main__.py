"""`python -m benchmarks.fairness`"""

import sys

from benchmarks.fairness.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
