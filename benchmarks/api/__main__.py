"""`python -m benchmarks.api`"""

from benchmarks.api.benchmark import main

if __name__ == "__main__":
    main()
