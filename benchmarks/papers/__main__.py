"""`python -m benchmarks.papers`"""

from benchmarks.papers.benchmark import main

if __name__ == "__main__":
    main()
