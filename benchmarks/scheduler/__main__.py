"""`python -m benchmarks.scheduler`"""

import sys

from benchmarks.scheduler.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
