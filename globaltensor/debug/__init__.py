"""Looking at global tensors: who holds what (`gt.show`), why an op ran so (`gt.explain`), what differs (`gt.audit`)."""
