// The measured limit: the shortest boxings in plain C between processes that share all their memory.
//
// Every rank's source and result lie in one mapping. A boxing is: meet, one pass over everyone's memory, meet. A small
// one copies its source into a slot first (two per rank, in turn), which saves the second meeting. No timeouts, float32
// and bfloat16 only, sizes that are multiples of 64 bytes a rank: a ruler, not a transport.
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef __x86_64__
#include <immintrin.h>
#define relax() _mm_pause()
#else
#define relax() ((void)0)
#endif

enum { P_TO_B, S_TO_B, P_TO_S, S_TO_S, P_TO_NEW_B, MOST_RANKS = 16 };
enum { FRONT = 64 << 10, SLOT = 16 << 10, STREAM_FROM = 16 << 20 };  // bytes; large results pass the caches by

typedef struct {
  _Alignas(128) _Atomic uint32_t seq;    // how many meetings this rank has come to
  _Alignas(64) _Atomic uint32_t ball;    // of the ping-pong
  double said[2];
} line_t;

static line_t* lines;                    // one per rank
static char *slots, *data;
static int me, ranks, pauses;
static size_t largest;
static uint32_t seq, turn, asked, ball;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

size_t ceiling_bytes(int n, size_t most) { return FRONT + (size_t)n * 2 * (SLOT + most); }
char* ceiling_source(int r) { return data + (size_t)r * 2 * largest; }
char* ceiling_result(int r) { return ceiling_source(r) + largest; }
static int makes_sum_for_all(int op) { return op == P_TO_B || op == P_TO_NEW_B; }
static char* slot(int r) { return slots + ((size_t)r * 2 + turn) * SLOT; }

// `spins`: how long to wait before giving the core away, which must be short where ranks share cores.
void ceiling_open(char* memory, int rank, int n, size_t most, int spins) {
  lines = (line_t*)memory;
  slots = memory + FRONT;
  data = slots + (size_t)n * 2 * SLOT;
  me = rank, ranks = n, largest = most, pauses = spins;
}

static void await(_Atomic uint32_t* word, uint32_t wanted) {
  for (int n = 0; (int32_t)(atomic_load_explicit(word, memory_order_acquire) - wanted) < 0; n++)
    if (n < pauses) relax(); else sched_yield();
}

void ceiling_meet(void) {
  atomic_store_explicit(&lines[me].seq, ++seq, memory_order_release);
  for (int k = 1; k < ranks; k++) await(&lines[(me + k) % ranks].seq, seq);
}

// The largest of what the ranks say.
double ceiling_slowest(double mine) {
  asked ^= 1;
  lines[me].said[asked] = mine;
  ceiling_meet();
  for (int r = 0; r < ranks; r++) mine = lines[r].said[asked] > mine ? lines[r].said[asked] : mine;
  return mine;
}

// ---- one pass, 64 bytes at a time
typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));

static inline words load(const char* from) { return *(const words*)from; }

static inline void store(char* to, words x, int stream) {
#if defined(__AVX512F__)
  if (stream) _mm512_stream_si512((void*)to, (__m512i)x);
#elif defined(__x86_64__)
  for (int k = 0; k < 4 && stream; k++) _mm_stream_si128((__m128i*)to + k, ((__m128i*)&x)[k]);
#else
  stream = 0;
#endif
  if (!stream) *(words*)to = x;
}

static inline words rounded(floats x) {  // to bfloat16, in the upper halves
  words bits = (words)x;
  return bits + 0x7FFF + (bits >> 16 & 1);
}

static inline __attribute__((always_inline)) void sum_of(int n, int m, char** from, char** to, size_t bytes, int item,
                                                         int stream) {
#pragma GCC unroll 2
  for (size_t i = 0; i < bytes; i += 64) {
    words x = load(from[0] + i);
    if (item == 4) {
      floats total = (floats)x;
      for (int k = 1; k < n; k++) total += (floats)load(from[k] + i);
      x = (words)total;
    } else {                             // two bfloat16 in a word: each is the upper half of a float
      floats even = (floats)(x << 16), odd = (floats)(x & 0xFFFF0000);
      for (int k = 1; k < n; k++) {
        x = load(from[k] + i);
        even += (floats)(x << 16), odd += (floats)(x & 0xFFFF0000);
      }
      x = rounded(even) >> 16 | (rounded(odd) & 0xFFFF0000);
    }
    for (int k = 0; k < m; k++) store(to[k] + i, x, stream);
  }
}

// The sum of all ranks' `sources` from `first` on, into `m` places. What it loops over is known when it is compiled.
static void sum(char** sources, size_t first, char** to, int m, size_t bytes, int item, int stream) {
  char* from[MOST_RANKS];
  for (int r = 0; r < ranks; r++) from[r] = sources[r] + first;
  int n = ranks, wide = item == 4;
  if (n == 2 && m == 1) wide ? sum_of(2, 1, from, to, bytes, 4, stream) : sum_of(2, 1, from, to, bytes, 2, stream);
  else if (n == 2) wide ? sum_of(2, 2, from, to, bytes, 4, stream) : sum_of(2, 2, from, to, bytes, 2, stream);
  else wide ? sum_of(n, m, from, to, bytes, 4, stream) : sum_of(n, m, from, to, bytes, 2, stream);
}

static void copy(char* to, const char* from, size_t bytes, int stream) {
  if (!stream) { memcpy(to, from, bytes); return; }
  for (size_t i = 0; i < bytes; i += 64) store(to + i, load(from + i), 1);
}

// The whole boxing for this rank, once the sources can be read. P -> B: in parts, which every rank stores into all
// results, if `shared`; else each rank makes all of it for itself.
static void pass(int op, size_t bytes, int item, char** source, char** result, int shared) {
  size_t part = bytes / (size_t)ranks;
  int stream = bytes >= STREAM_FROM;
  char* to[MOST_RANKS] = {result[me]};
  if (makes_sum_for_all(op) && !shared) sum(source, 0, to, 1, bytes, item, stream);
  if (makes_sum_for_all(op) && shared) {
    for (int r = 0; r < ranks; r++) to[r] = result[r] + part * (size_t)me;
    sum(source, part * (size_t)me, to, ranks, part, item, stream);
  }
  if (op == P_TO_S) sum(source, part * (size_t)me, to, 1, part, item, stream);
  for (int k = 0; k < ranks && (op == S_TO_B || op == S_TO_S); k++) {
    int r = (me + k) % ranks;
    copy(result[me] + part * (size_t)r, source[r] + (op == S_TO_S ? part * (size_t)me : 0), part, stream);
  }
#ifdef __x86_64__
  if (stream) _mm_sfence();
#endif
}

static size_t held(int op, size_t bytes) { return op == S_TO_B ? bytes / (size_t)ranks : bytes; }

static void box(int op, size_t bytes, int item) {
  char *source[MOST_RANKS], *result[MOST_RANKS];
  int small = held(op, bytes) <= (makes_sum_for_all(op) ? SLOT / 4 : SLOT);
  turn ^= 1;
  for (int r = 0; r < ranks; r++) {
    source[r] = small ? slot(r) : ceiling_source(r);
    result[r] = op == P_TO_B ? ceiling_source(r) : ceiling_result(r);
  }
  if (small) memcpy(source[me], ceiling_source(me), held(op, bytes));
  ceiling_meet();
  pass(op, bytes, item, source, result, !small);
  if (!small) ceiling_meet();
}

static void write_source(int op, size_t bytes) {
  memset(ceiling_source(me), 0, held(op, bytes));
  __asm__ volatile("" ::: "memory");     // the next one is not left out
}

// Seconds for so many; `bytes` are those of the largest shard that a rank has before or after. `fresh`: the source is
// written anew before each, and the time of that taken off.
double ceiling_run(int op, size_t bytes, int item, int times, int fresh) {
  double began = now(), took;
  for (int i = 0; i < times; i++) {
    if (fresh) write_source(op, bytes);
    box(op, bytes, item);
  }
  took = now() - began;
  if (!fresh) return took;
  began = now();
  for (int i = 0; i < times; i++) write_source(op, bytes);
  return took - (now() - began);
}

// One-way latency of a cache line between ranks 0 and 1, in nanoseconds: the best tenth of 40 laps. 0 on other ranks.
double ceiling_pingpong(void) {
  double lap[40];
  if (me > 1 || ranks < 2) return 0;
  for (int k = 0; k < 40; k++) {
    double began = now();
    for (int i = 0; i < 200; i++) {
      ball++;
      if (me == 1) await(&lines[0].ball, ball);
      atomic_store_explicit(&lines[me].ball, ball, memory_order_release);
      if (me == 0) await(&lines[1].ball, ball);
    }
    lap[k] = (now() - began) / 400 * 1e9;
    for (int j = k; j > 0 && lap[j] < lap[j - 1]; j--) {
      double other = lap[j];
      lap[j] = lap[j - 1], lap[j - 1] = other;
    }
  }
  return lap[4];
}
