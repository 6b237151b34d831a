"""`python -m benchmarks.planner`"""

import sys

from benchmarks.planner.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
