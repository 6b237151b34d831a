"""`python -m benchmarks.fairness`"""

from benchmarks.fairness.benchmark import main

if __name__ == "__main__":
    main()
