"""`python -m benchmarks.cluster`"""

from benchmarks.cluster.benchmark import main

if __name__ == "__main__":
    main()
