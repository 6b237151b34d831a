"""`python -m benchmarks.memory`"""

from benchmarks.memory.benchmark import main

if __name__ == "__main__":
    main()
