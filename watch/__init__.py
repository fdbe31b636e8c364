"""What a farm is doing: its jobs and workers, its bottlenecks, and when it will be done."""
