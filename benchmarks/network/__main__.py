"""`python -m benchmarks.network`"""

from benchmarks.network.benchmark import main

if __name__ == "__main__":
    main()
