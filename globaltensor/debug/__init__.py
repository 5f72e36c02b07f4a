"""Looking at global tensors and runs: `gt.show` (who holds what), `gt.explain` (why), `gt.audit`, `gt.metrics`."""
