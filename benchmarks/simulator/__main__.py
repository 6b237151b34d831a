"""`python -m benchmarks.simulator`"""

import sys

from benchmarks.simulator.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
