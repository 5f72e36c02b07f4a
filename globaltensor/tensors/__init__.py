"""GlobalTensor: the tensor itself, its gradients, the ways to make one."""
