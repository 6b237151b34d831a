"""`python -m benchmarks.scheduler`"""

from benchmarks.scheduler.benchmark import main

if __name__ == "__main__":
    main()
