"""Other people's clients, each on a farm with a real model: `make clients`."""
