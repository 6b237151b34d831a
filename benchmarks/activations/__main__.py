"""`python -m benchmarks.activations`"""

from benchmarks.activations.benchmark import main

if __name__ == "__main__":
    main()
