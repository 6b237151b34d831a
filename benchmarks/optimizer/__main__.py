"""`python -m benchmarks.optimizer`"""

import sys

from benchmarks.optimizer.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
