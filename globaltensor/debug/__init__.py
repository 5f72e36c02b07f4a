"""Looking at global tensors: who holds what (`gt.show`), and why an op ran as it did (`gt.explain`)."""
