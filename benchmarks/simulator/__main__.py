"""`python -m benchmarks.simulator`"""

from benchmarks.simulator.benchmark import main

if __name__ == "__main__":
    main()
