"""One op on global tensors: legal signatures, the cheapest, box, run the local op on every driven rank, wrap."""
