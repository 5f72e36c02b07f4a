// Two levels of a heap: runs of pages, and spans of small blocks cut from them. heap.h explains.
#include "heap.h"

#include <string.h>
#include <sys/mman.h>

#include <new>

namespace gt {

// ---- runs of pages

Runs::Runs(uint64_t pages) : pages_(pages) {
  // Reserved, not used: an entry costs memory once its page has been used.
  void* table = mmap(nullptr, pages * sizeof(Page), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) throw std::bad_alloc();
  page_ = static_cast<Page*>(table);
  for (uint32_t& head : head_) head = kNone;
}

Runs::~Runs() { munmap(page_, pages_ * sizeof(Page)); }

int Runs::bin(uint32_t pages) {
  if (pages < 32) return static_cast<int>(pages);
  int log = 31 - __builtin_clz(pages);
  return 32 + (log - 5) * 16 + static_cast<int>((pages >> (log - 4)) & 15);
}

void Runs::link(uint32_t first, uint32_t pages, bool resident) {
  int b = bin(pages);
  Page& p = page_[first];
  p = {pages, kNone, head_[b], kFree, resident};
  Page& last = page_[first + pages - 1];
  last.length = pages;
  if (pages > 1) last.kind = kFree;
  if (p.next != kNone) page_[p.next].prev = first;
  head_[b] = first;
  filled_[b / 64] |= uint64_t{1} << (b % 64);
  if (resident) resident_free_ += pages;
}

void Runs::unlink(uint32_t first) {
  Page& p = page_[first];
  if (p.next != kNone) page_[p.next].prev = p.prev;
  if (p.prev != kNone) {
    page_[p.prev].next = p.next;
  } else {
    int b = bin(p.length);
    head_[b] = p.next;
    if (p.next == kNone) filled_[b / 64] &= ~(uint64_t{1} << (b % 64));
  }
  if (p.resident) resident_free_ -= p.length;
  page_[first + p.length - 1].kind = kInside;
  p.kind = kInside;
}

// The list of a size holds runs of about that size, so a few are looked at for one that fits; all of the next list do.
uint32_t Runs::find(uint32_t pages) const {
  int b = bin(pages);
  uint32_t best = kNone;
  int looked = 0;
  for (uint32_t r = head_[b]; r != kNone && looked < 8; r = page_[r].next, ++looked) {
    if (page_[r].length < pages) continue;
    if (best == kNone || page_[r].length < page_[best].length) best = r;
    if (page_[r].length == pages) break;
  }
  if (best != kNone) return best;
  for (int word = (b + 1) / 64; word < kBins / 64; ++word) {
    uint64_t bits = filled_[word];
    if (word == (b + 1) / 64) bits &= ~uint64_t{0} << ((b + 1) % 64);
    if (bits) return head_[word * 64 + __builtin_ctzll(bits)];
  }
  return kNone;
}

uint32_t Runs::take(uint32_t pages) {
  uint32_t first = find(pages);
  if (first != kNone) {
    Page run = page_[first];
    unlink(first);
    if (run.length > pages) link(first + pages, run.length - pages, run.resident);
  } else {
    first = top_;
    bool grows = top_ && page_[top_ - 1].kind == kFree;  // the last run is free, but too short: make it longer
    if (grows) first = top_ - page_[top_ - 1].length;
    if (pages_ - first < pages) return kNone;
    if (grows) unlink(first);
    top_ = first + pages;
  }
  page_[first].length = pages;
  page_[first].kind = kUsed;
  used_ += pages;
  return first;
}

void Runs::give(uint32_t first) {
  uint32_t pages = page_[first].length;
  used_ -= pages;
  page_[first].kind = kInside;
  uint32_t after = first + pages;
  if (after < top_ && page_[after].kind == kFree) {
    pages += page_[after].length;
    unlink(after);
  }
  if (first && page_[first - 1].kind == kFree) {
    uint32_t before = first - page_[first - 1].length;
    pages += page_[before].length;
    unlink(before);
    first = before;
  }
  link(first, pages, true);
}

uint32_t Runs::shed() {
  for (int word = kBins / 64 - 1; word >= 0; --word)
    for (uint64_t bits = filled_[word]; bits;) {
      int bit = 63 - __builtin_clzll(bits);
      bits &= ~(uint64_t{1} << bit);
      for (uint32_t r = head_[word * 64 + bit]; r != kNone; r = page_[r].next)
        if (page_[r].resident) {
          page_[r].resident = 0;
          resident_free_ -= page_[r].length;
          return r;
        }
    }
  return kNone;
}

// ---- small blocks

Heap::Heap(uint64_t bytes) : runs_(bytes / kPage) {
  for (int c = 0; c < kClasses; ++c) {
    uint32_t size = c < 16 ? (c + 1) * 64 : (1024u << ((c - 16) / 8)) / 8 * (9 + (c - 16) % 8);
    class_[c] = {size, size <= kPage ? 16u : 64u, Runs::kNone, 0, {}};
  }
}

int Heap::class_of(uint64_t bytes) {
  if (bytes <= 1024) return static_cast<int>((bytes - 1) / 64);
  uint64_t last = bytes - 1;
  int log = 63 - __builtin_clzll(last);
  return 16 + (log - 10) * 8 + static_cast<int>((last >> (log - 3)) & 7);
}

uint64_t Heap::take(uint64_t bytes) {
  if (!bytes) bytes = 1;
  if (bytes > kSmall) {
    uint64_t pages = (bytes + kPage - 1) / kPage;
    if (bytes > kNowhere / 2 || pages >= Runs::kNone) return kNowhere;
    uint32_t first = runs_.take(static_cast<uint32_t>(pages));
    return first == Runs::kNone ? kNowhere : first * kPage;
  }
  int cls = class_of(bytes);
  Class& c = class_[cls];
  if (c.hot_count) return c.hot[--c.hot_count];
  if (c.head == Runs::kNone && !grow(cls)) return kNowhere;
  return from_span(c);
}

void Heap::give(uint64_t offset) {
  Runs::Page& page = runs_.at(static_cast<uint32_t>(offset / kPage));
  if (page.kind != Runs::kSpan) return runs_.give(static_cast<uint32_t>(offset / kPage));
  Class& c = class_[spans_[page.prev].cls];
  if (c.hot_count == kHot) {  // the older half goes back, so that the next ones are quick again
    for (int i = 0; i < kHot / 2; ++i) to_span(c.hot[i]);
    memmove(c.hot, c.hot + kHot / 2, sizeof(c.hot) / 2);
    c.hot_count = kHot / 2;
  }
  c.hot[c.hot_count++] = offset;
}

uint64_t Heap::size(uint64_t offset) {
  Runs::Page& page = runs_.at(static_cast<uint32_t>(offset / kPage));
  return page.kind == Runs::kSpan ? class_[spans_[page.prev].cls].size : page.length * kPage;
}

bool Heap::grow(int cls) {
  Class& c = class_[cls];
  if (unused_.empty()) {
    spans_.emplace_back();
    unused_.reserve(spans_.size());  // so that giving a span back never allocates
    unused_.push_back(static_cast<uint32_t>(spans_.size() - 1));
  }
  uint32_t first = runs_.take(c.pages);
  if (first == Runs::kNone) return false;
  uint32_t index = unused_.back();
  unused_.pop_back();
  Span& s = spans_[index];
  uint16_t blocks = static_cast<uint16_t>(c.pages * kPage / c.size);
  s = {first, Runs::kNone, Runs::kNone, static_cast<uint16_t>(cls), blocks, blocks, {}};
  for (int i = 0; i < blocks; ++i) s.bits[i / 64] |= uint64_t{1} << (i % 64);
  for (uint32_t p = first; p < first + c.pages; ++p) {
    runs_.at(p).kind = Runs::kSpan;
    runs_.at(p).prev = index;
  }
  link(index);
  return true;
}

uint64_t Heap::from_span(Class& c) {
  uint32_t index = c.head;
  Span& s = spans_[index];
  int word = 0;
  while (!s.bits[word]) ++word;
  int bit = __builtin_ctzll(s.bits[word]);
  s.bits[word] &= s.bits[word] - 1;
  if (--s.free == 0) unlink(index);
  return s.first * kPage + uint64_t(word * 64 + bit) * c.size;
}

void Heap::to_span(uint64_t offset) {
  uint32_t index = runs_.at(static_cast<uint32_t>(offset / kPage)).prev;
  Span& s = spans_[index];
  Class& c = class_[s.cls];
  uint64_t block = (offset - s.first * kPage) / c.size;
  s.bits[block / 64] |= uint64_t{1} << (block % 64);
  if (s.free++ == 0) link(index);
  bool only = s.prev == Runs::kNone && s.next == Runs::kNone;
  if (s.free < s.blocks || only) return;  // the only one stays: it would be wanted again at once
  unlink(index);
  for (uint32_t p = s.first; p < s.first + c.pages; ++p) runs_.at(p).kind = Runs::kInside;
  runs_.at(s.first).kind = Runs::kUsed;
  runs_.give(s.first);
  unused_.push_back(index);
}

void Heap::link(uint32_t index) {
  Span& s = spans_[index];
  Class& c = class_[s.cls];
  s.prev = Runs::kNone;
  s.next = c.head;
  if (c.head != Runs::kNone) spans_[c.head].prev = index;
  c.head = index;
}

void Heap::unlink(uint32_t index) {
  Span& s = spans_[index];
  if (s.next != Runs::kNone) spans_[s.next].prev = s.prev;
  (s.prev != Runs::kNone ? spans_[s.prev].next : class_[s.cls].head) = s.next;
  s.prev = s.next = Runs::kNone;
}

}  // namespace gt
