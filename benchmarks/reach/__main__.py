"""`python -m benchmarks.reach`"""

from benchmarks.reach.benchmark import main

if __name__ == "__main__":
    main()
