"""What is measured, by commands that anyone can run."""
