// The GPU's kernels as threads of this process: a library with the same interface, for tests where there is no GPU.
// What the host asks of CUDA itself is answered as by one whose devices reach each other.
#include "kernels/reduce.cu"
#include "philox/philox.cu"

int gt_cuda_load(int) { return GT_CUDA_OK; }
int gt_cuda_reach(int, int) { return GT_CUDA_OK; }
int gt_cuda_blocks(int, int* blocks) { return *blocks = 2, GT_CUDA_OK; }
const char* gt_cuda_message(int status) { return status == GT_CUDA_DTYPE ? "these dtypes cannot be reduced so" : "no"; }

#if defined(GT_PLANTS)
// Plants a mistake in the kernels (enum gt_plant), or takes it away (0).
extern "C" GT_EXPORT void gt_plant_fault(int plant) { gt_planted_now = plant; }
#endif
