"""`python -m benchmarks.dispatch`"""

from benchmarks.dispatch.benchmark import main

if __name__ == "__main__":
    main()
