"""Jobs that others enqueue through RQ: tasks, recurring jobs, downloads, webhooks, limits."""
