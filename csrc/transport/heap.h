// Where the blocks of an arena are, as numbers only: no lock, and the memory itself is never touched.
//
// Two levels. Runs of 4 KB pages: free neighbours are joined, and free runs are kept in lists by size (32 exact ones,
// then 16 per doubling), so that a run is found in constant time and fits within 1/16. Above the highest page ever used
// nothing is fresh: memory that was touched once is used again before new pages, which fault, are.
// Blocks of up to 32 KB come from spans: a run cut into blocks of one of 56 sizes, with a bit per block. In front of
// every size's spans stand the few blocks freed last, which are handed out first: their lines are still in the cache.
#pragma once
#include <stdint.h>

#include <vector>

namespace gt {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kNowhere = ~uint64_t{0};

// Runs of pages: a best fit, nearly.
class Runs {
 public:
  explicit Runs(uint64_t pages);  // throws std::bad_alloc
  ~Runs();
  Runs(const Runs&) = delete;
  Runs& operator=(const Runs&) = delete;

  struct Page {
    uint32_t length;      // of the run: on its first page, and of a free run on its last page too
    uint32_t prev, next;  // in the list of free runs; on a span's pages `prev` is the span
    uint8_t kind;         // what begins here
    uint8_t resident;     // of a free run: some of it was touched since it was last given back to the kernel
  };
  enum Kind : uint8_t { kInside, kFree, kUsed, kSpan };

  uint32_t take(uint32_t pages);  // the first page, or kNone
  void give(uint32_t first);
  Page& at(uint32_t page) { return page_[page]; }
  uint32_t top() const { return top_; }  // every page from here on was never used
  uint64_t resident_free() const { return resident_free_; }
  uint64_t used() const { return used_; }

  // The largest free run that still has memory, which its caller now gives back; kNone where there is none.
  uint32_t shed();

  static constexpr uint32_t kNone = ~uint32_t{0};

 private:
  static constexpr int kBins = 512;
  static int bin(uint32_t pages);
  uint32_t find(uint32_t pages) const;
  void link(uint32_t first, uint32_t pages, bool resident);
  void unlink(uint32_t first);

  Page* page_;
  uint64_t pages_;
  uint32_t top_ = 0;
  uint64_t resident_free_ = 0, used_ = 0;  // in pages
  uint32_t head_[kBins];
  uint64_t filled_[kBins / 64] = {};       // a bit per list that is not empty
};

class Heap {
 public:
  explicit Heap(uint64_t bytes);
  uint64_t take(uint64_t bytes);      // an offset, a multiple of 64 (of 4096 above 32 KB), or kNowhere
  void give(uint64_t offset);         // of a block that take gave
  uint64_t size(uint64_t offset);     // of the block there
  Runs& runs() { return runs_; }

 private:
  static constexpr uint64_t kSmall = 32 * 1024;
  static constexpr int kClasses = 56, kHot = 16;
  struct Span {
    uint32_t first;                   // page
    uint32_t prev, next;              // among the spans of this class that have a free block
    uint16_t cls, free, blocks;
    uint64_t bits[16];                // 1: free
  };
  struct Class {
    uint32_t size, pages;             // of a block, in bytes; of a span
    uint32_t head;                    // the first span with a free block
    uint32_t hot_count;
    uint64_t hot[kHot];               // blocks freed last
  };
  static int class_of(uint64_t bytes);
  bool grow(int cls);
  uint64_t from_span(Class& c);
  void to_span(uint64_t offset);
  void link(uint32_t span);
  void unlink(uint32_t span);

  Runs runs_;
  Class class_[kClasses];
  std::vector<Span> spans_;
  std::vector<uint32_t> unused_;      // of spans_
};

}  // namespace gt
