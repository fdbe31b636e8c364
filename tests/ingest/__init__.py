"""Tests of jobs that others enqueue: the RQ door, downloads, webhooks, what is allowed."""
