"""`python -m benchmarks.activations`"""

import sys

from benchmarks.activations.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
