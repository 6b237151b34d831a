"""`python -m benchmarks.ssd`"""

from benchmarks.ssd.benchmark import main

if __name__ == "__main__":
    main()
