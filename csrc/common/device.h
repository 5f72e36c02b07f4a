// One kernel source for two machines: nvcc makes GPU code of it, g++ makes ordinary threads.
//
// Kernels are written against the few names below and plain C++. With g++ every CUDA thread is a thread of the process,
// a block shares a buffer and a barrier, and a launch returns when all have ended. So index arithmetic, values, and the
// order in which memory is written and read are tested where there is no GPU, the last by ThreadSanitizer.
//
// What this cannot show: warps, the scopes of memory orders (.gpu or .sys), whether blocks run at the same time.
#pragma once
#include <stdint.h>
#include <string.h>

// A mistake that a test plants, to prove that it would be found; nothing without GT_PLANTS.
enum gt_plant {
  GT_NO_PLANT, GT_NO_ENTRY, GT_NO_EXIT, GT_NO_SYNC, GT_RELAXED_STORE, GT_RELAXED_LOAD, GT_NO_TURN_SYNC,
  GT_BAD_COPY, GT_BAD_TURN, GT_BAD_FLOATS, GT_BAD_INTEGERS, GT_BAD_UPLOAD, GT_BAD_END,  // for the self-test to find
  GT_BAD_WORDS, GT_BAD_UNIFORM, GT_BAD_NORMAL, GT_BAD_EXPONENTIAL, GT_BAD_RANDOM_INTEGERS, GT_BAD_BERNOULLI
};
#if defined(GT_PLANTS)
inline int gt_planted_now = GT_NO_PLANT;
#define gt_planted(plant) (gt_planted_now == (plant))
#else
#define gt_planted(plant) false
#endif

struct gt_half { uint16_t bits; };
struct gt_bfloat { uint16_t bits; };
struct alignas(8) gt_word8 { uint32_t part[2]; };
struct alignas(16) gt_word16 { uint32_t part[4]; };

template <int width> struct gt_word_of;  // a piece of memory that is moved at once
template <> struct gt_word_of<1> { using type = uint8_t; };
template <> struct gt_word_of<2> { using type = uint16_t; };
template <> struct gt_word_of<4> { using type = uint32_t; };
template <> struct gt_word_of<8> { using type = gt_word8; };
template <> struct gt_word_of<16> { using type = gt_word16; };
template <int width> using gt_word = typename gt_word_of<width>::type;

#if defined(__CUDACC__)
// -------------------------------------------------------------------------------------------------- a GPU
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define GT_DEVICE __device__ __forceinline__
#define GT_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define GT_ARGUMENT const __grid_constant__  // by value, and read in place: never copied into each thread
#define GT_SHARED(type, name) __shared__ type name
#ifndef GT_THREADS
#define GT_THREADS 256
#endif
#define GT_WAVES 32       // blocks per multiprocessor that are worth launching
#define GT_PATIENCE 1024  // spins between looks at the abort word, which is in the memory of the host

GT_DEVICE void gt_send(uint32_t* at, uint32_t value) {  // seen by a peer that reads it, with all that came before
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
GT_DEVICE uint32_t gt_look(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
GT_DEVICE uint32_t gt_glance(const uint32_t* at) {  // with no order
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
GT_DEVICE void gt_note(uint32_t* at, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
GT_DEVICE void gt_pause() {}
GT_DEVICE void gt_sync() { __syncthreads(); }
GT_DEVICE bool gt_all(bool here) { return __syncthreads_and(here); }  // a barrier of the block too

// Addresses come from a table, so the compiler is told what they are: of a GPU's memory, this or another.
#define GT_GLOBAL(at) __builtin_assume(__isGlobal(at))
template <int width> GT_DEVICE gt_word<width> gt_read(const char* at) {
  GT_GLOBAL(at);
  return *(const gt_word<width>*)at;
}
template <> GT_DEVICE gt_word8 gt_read<8>(const char* at) {
  GT_GLOBAL(at);
  const uint2 word = *(const uint2*)at;
  return {{word.x, word.y}};
}
template <> GT_DEVICE gt_word16 gt_read<16>(const char* at) {
  GT_GLOBAL(at);
  const uint4 word = *(const uint4*)at;
  return {{word.x, word.y, word.z, word.w}};
}
template <int width> GT_DEVICE void gt_write(char* at, gt_word<width> word) {
  GT_GLOBAL(at);
  *(gt_word<width>*)at = word;
}
template <> GT_DEVICE void gt_write<8>(char* at, gt_word8 word) {
  GT_GLOBAL(at);
  *(uint2*)at = make_uint2(word.part[0], word.part[1]);
}
template <> GT_DEVICE void gt_write<16>(char* at, gt_word16 word) {
  GT_GLOBAL(at);
  *(uint4*)at = make_uint4(word.part[0], word.part[1], word.part[2], word.part[3]);
}

GT_DEVICE uint32_t gt_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
GT_DEVICE float gt_widen(gt_half x) { return __half2float(__ushort_as_half(x.bits)); }
GT_DEVICE float gt_widen(gt_bfloat x) { return __uint_as_float((uint32_t)x.bits << 16); }
GT_DEVICE uint32_t gt_bits(float x) { return __float_as_uint(x); }
GT_DEVICE uint16_t gt_rounded_half(float x) { return __half_as_ushort(__float2half_rn(x)); }
GT_DEVICE uint16_t gt_rounded_bfloat(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

// Makes a device the thread's current one, for as long as this lives.
class gt_on_device {
 public:
  explicit gt_on_device(int device) : error((int)cudaGetDevice(&before_)), device_(device) {
    if (!error && before_ != device_) error = (int)cudaSetDevice(device_);
  }
  ~gt_on_device() {
    if (!error && before_ != device_) (void)cudaSetDevice(before_);
  }
  gt_on_device(const gt_on_device&) = delete;
  int error;

 private:
  int before_ = 0, device_;
};
// Not <<< >>>: what that returns may be the error of somebody else's call.
template <class Argument>
int gt_launch(void (*kernel)(Argument), int grid, int block, void* stream, Argument argument) {
  void* arguments[] = {&argument};
  return (int)cudaLaunchKernel((const void*)kernel, dim3(grid), dim3(block), arguments, 0, (cudaStream_t)stream);
}
inline int gt_processors(int device) {
  int count = 0;
  (void)cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count > 0 ? count : 1;
}

#else
// -------------------------------------------------------------------------------------------------- threads
#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#define __host__
#define __device__
#define GT_DEVICE inline
#define GT_KERNEL(threads, blocks) static void
#define GT_ARGUMENT const
#ifndef GT_THREADS
#define GT_THREADS 32
#endif
#define GT_WAVES 3
#define GT_PATIENCE 16

// Threads meet at pthread's barrier, not at std::barrier: all of the latter share one pool of waiters, which orders
// blocks that nothing else orders, and so hides from ThreadSanitizer what is missing. Shared memory is handed out
// without a lock for the same reason, and begins as rubbish, as on a GPU.
struct gt_block {
  pthread_barrier_t barrier;
  std::atomic<int> against{0};
  alignas(64) char shared[48 << 10];
  explicit gt_block(int threads) {
    pthread_barrier_init(&barrier, nullptr, (unsigned)threads);
    memset(shared, 0xCD, sizeof(shared));
  }
  ~gt_block() { pthread_barrier_destroy(&barrier); }
};
struct gt_index { unsigned x = 0; };
inline thread_local gt_index threadIdx, blockIdx, blockDim, gridDim;
inline thread_local gt_block* gt_here;

#define GT_SHARED(type, name)                                                                      \
  static_assert(sizeof(type) <= sizeof(gt_block::shared), "more than a block shares: one a kernel"); \
  type& name = *reinterpret_cast<type*>(gt_here->shared)

inline void gt_send(uint32_t* at, uint32_t value) {
  if (gt_planted(GT_RELAXED_STORE)) __atomic_store_n(at, value, __ATOMIC_RELAXED);
  else __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
inline uint32_t gt_look(const uint32_t* at) {
  return gt_planted(GT_RELAXED_LOAD) ? __atomic_load_n(at, __ATOMIC_RELAXED) : __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
inline uint32_t gt_glance(const uint32_t* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
inline void gt_note(uint32_t* at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
inline void gt_pause() { sched_yield(); }
inline void gt_sync() { pthread_barrier_wait(&gt_here->barrier); }
inline bool gt_all(bool here) {
  if (!here) gt_here->against.fetch_add(1, std::memory_order_relaxed);
  gt_sync();
  bool all = gt_here->against.load(std::memory_order_relaxed) == 0;
  gt_sync();
  if (!here) gt_here->against.fetch_sub(1, std::memory_order_relaxed);
  return all;
}

template <int width> gt_word<width> gt_read(const char* at) {
  assert((uintptr_t)at % width == 0);  // a GPU traps
  gt_word<width> word;
  memcpy(&word, at, width);
  return word;
}
template <int width> void gt_write(char* at, gt_word<width> word) {
  assert((uintptr_t)at % width == 0);
  memcpy(at, &word, width);
}

inline uint32_t gt_high(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
template <class To, class From> To gt_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline float gt_widen(gt_bfloat x) { return gt_as<float>((uint32_t)x.bits << 16); }
inline uint32_t gt_bits(float x) { return gt_as<uint32_t>(x); }
inline uint16_t gt_rounded_bfloat(float x) { return (uint16_t)((gt_bits(x) + 0x7FFF + (gt_bits(x) >> 16 & 1)) >> 16); }
inline float gt_widen(gt_half x) {
  int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                : exponent     ? ldexpf((float)(fraction | 1024), exponent - 25)
                               : ldexpf((float)fraction, -24);
  return x.bits >> 15 ? -value : value;
}
inline uint16_t gt_rounded_half(float x) {  // to the nearest multiple of the last place, ties to even
  uint16_t sign = gt_bits(x) >> 16 & 0x8000;
  float size = fabsf(x);
  if (!(size < 65520)) return sign | 0x7C00;
  int exponent = size < 0x1p-14f ? -14 : ilogbf(size);
  auto fraction = (uint16_t)nearbyintf(ldexpf(size, 10 - exponent));  // 1024 and more: a normal number
  return (uint16_t)(sign | ((exponent + 14) * 1024 + fraction));
}

template <class Argument>
int gt_launch(void (*kernel)(Argument), int grid, int block, void*, const Argument& argument) {
  std::vector<std::unique_ptr<gt_block>> blocks;
  std::vector<std::thread> threads;
  for (int b = 0; b < grid; b++) blocks.push_back(std::make_unique<gt_block>(block));
  for (int b = 0; b < grid; b++)
    for (int t = 0; t < block; t++)
      threads.emplace_back([=, &blocks, &argument] {
        threadIdx.x = (unsigned)t, blockIdx.x = (unsigned)b, blockDim.x = (unsigned)block, gridDim.x = (unsigned)grid;
        gt_here = blocks[b].get();
        kernel(argument);
      });
  for (auto& thread : threads) thread.join();
  return 0;
}
struct gt_on_device {
  explicit gt_on_device(int) {}
  int error = 0;
};
inline int gt_processors(int) { return 1; }
#endif

// NaN as torch's CPU has it: the hardware's own would be 0x7FFF.
GT_DEVICE gt_half gt_to_half(float x) {
  return {(uint16_t)(x != x ? (gt_bits(x) >> 16 & 0x8000) | 0x7E00 : gt_rounded_half(x))};
}
GT_DEVICE gt_bfloat gt_to_bfloat(float x) { return {(uint16_t)(x != x ? 0x7FC0 : gt_rounded_bfloat(x))}; }

// n / size for n < 2**31, with the numbers of Granlund and Montgomery, "Division by Invariant Integers", 1994.
GT_DEVICE uint32_t gt_divide(uint32_t n, uint32_t magic, int shift) { return (gt_high(n, magic) + n) >> shift; }
template <class Shift> uint32_t gt_magic(uint32_t size, Shift& shift) {
  for (shift = 0; 1ull << shift < size;) shift++;
  return (uint32_t)((1ull << 32) * ((1ull << shift) - size) / size + 1);
}
