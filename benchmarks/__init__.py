"""One file per claim of docs/benchmarks.md; ``python -m benchmarks`` lists them."""
