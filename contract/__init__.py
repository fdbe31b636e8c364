"""The contract: everything that crosses a process boundary.

corpus -> producer == blocks ==> worker (one per device) == results ==> collector -> sink
                                 ^ plan       | completions
                                 +- scheduler <+                        == is Redis

A station (producer, scheduler, workers, collector) imports this package and itself, never
another station. Nothing here imports torch.
"""
