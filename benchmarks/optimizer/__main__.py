"""`python -m benchmarks.optimizer`"""

from benchmarks.optimizer.benchmark import main

if __name__ == "__main__":
    main()
