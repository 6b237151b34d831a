"""`python -m benchmarks.planner`"""

from benchmarks.planner.benchmark import main

if __name__ == "__main__":
    main()
