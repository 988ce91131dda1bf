"""The chain over several processes and hosts, under `torchrun`: each rank holds a range of stages, rank 0 the user."""
