// The GPU's kernels as threads of this process: a library with the same interface, for tests where there is no GPU.
#include "kernels/reduce.cu"
#include "philox/philox.cu"
