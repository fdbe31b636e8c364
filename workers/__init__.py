"""The worker station: finds the devices, and embeds blocks with one process pinned to each."""
