// Reaching memory of other GPUs: of this process (peer access), and of other processes of this host (CUDA IPC).
//
// A handle stands for what cudaMalloc gave out, which an allocator cuts into many tensors; so it travels with the
// offset of the pointer in it. The same memory opened twice is mapped once, and counted.
#include <algorithm>

#include "../common/device.h"
#include "reduce_cuda.h"

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(gt_cuda_ipc::handle), "a handle of CUDA");

// Found at run time: this library loads where there is no driver.
static int range_of(const void* data, char** base, size_t* bytes) {
  typedef int (*Function)(char**, size_t*, uintptr_t);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  int error = (int)cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000, cudaEnableDefault,
                                                    &result);
#else
  int error = (int)cudaGetDriverEntryPoint("cuMemGetAddressRange", &function, cudaEnableDefault, &result);
#endif
  if (error) return error;
  if (result != cudaDriverEntryPointSuccess || !function) return (int)cudaErrorNotSupported;
  return ((Function)function)(base, bytes, (uintptr_t)data);  // a CUresult: the codes of the two are the same here
}

int gt_cuda_ipc_export(int device, const void* data, gt_cuda_ipc* memory) {
  gt_on_device here(device);
  char* base = nullptr;
  size_t bytes = 0;
  cudaIpcMemHandle_t handle;
  int error = here.error;
  if (!error) error = range_of(data, &base, &bytes);
  if (!error) error = (int)cudaIpcGetMemHandle(&handle, base);
  if (error) return error;
  memcpy(memory->handle, &handle, sizeof(handle));
  memory->offset = (uint64_t)((const char*)data - base);
  memory->bytes = bytes;
  return GT_CUDA_OK;
}

int gt_cuda_ipc_open(int device, const gt_cuda_ipc* memory, void** data) {
  gt_on_device here(device);
  cudaIpcMemHandle_t handle;
  memcpy(&handle, memory->handle, sizeof(handle));
  void* base = nullptr;
  int error = here.error;
  if (!error) error = (int)cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess);
  *data = error ? nullptr : (char*)base + memory->offset;
  return error;
}

int gt_cuda_ipc_close(int device, const gt_cuda_ipc* memory, void* data) {
  gt_on_device here(device);
  return here.error ? here.error : (int)cudaIpcCloseMemHandle((char*)data - memory->offset);
}

int gt_cuda_reach(int device, int peer) {
  if (device == peer) return GT_CUDA_OK;
  gt_on_device here(device);
  int error = here.error, can = 0;
  if (!error) error = (int)cudaDeviceCanAccessPeer(&can, device, peer);
  if (error) return error;
  if (!can) return (int)cudaErrorPeerAccessUnsupported;
  error = (int)cudaDeviceEnablePeerAccess(peer, 0);
  if (error != (int)cudaErrorPeerAccessAlreadyEnabled) return error;
  (void)cudaGetLastError();  // said once, and taken back
  return GT_CUDA_OK;
}

const char* gt_cuda_message(int status) {
  switch (status) {
    case GT_CUDA_OK: return "done";
    case GT_CUDA_DTYPE: return "these dtypes cannot be reduced so, or not cast into each other";
    case GT_CUDA_ROOM: return "the table of regions needs room on the device, as much as gt_cuda_room says";
    case GT_CUDA_MISALIGNED: return "the address of an element is not a multiple of its size";
    case GT_CUDA_TOO_LARGE: return "a region of more than 65535 sources or targets, or 2**31 tiles";
    case GT_CUDA_GROUP: return "the ranks or blocks of a group are out of bounds";
    case GT_CUDA_NO_MEMORY: return "no memory left on the host";
    default: return status > 0 ? cudaGetErrorString((cudaError_t)status) : "unknown";
  }
}
