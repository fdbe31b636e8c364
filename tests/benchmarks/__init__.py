"""The benchmarks' own figures, documents and runs."""
