// A collective as a boxing: which rows of whose shards are copied, or reduced, into which rows of whose.
//
// A shard is a matrix, `columns` elements to a row; most have one row. Rank r of n, seen from rank 0 of 2:
//
//     Gather      row r of mine is shard r                       [0] <- shard 0    [1] <- shard 1
//     ReduceRows  mine is the sum of row `me` of all shards      [0] <- row 0 of shard 0 + row 0 of shard 1
//     ReduceParts my n-th of the columns, summed, into all       [first half] of both <- shard 0 + shard 1
//
// No torch here, and no memory: a program says what is done once per shape, `gt_move` with which tensors.
#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transport/transport.h"

namespace gt::collective {

enum class Pattern : uint8_t {
  ReduceAll,    // everyone's is the sum of all shards: read by all, so that it must not be written in place
  ReduceParts,  // the same in two steps, for what is large: each rank does a part and stores it into all shards
  ReduceRows,   // rank r's is the sum of row r of all shards
  Reduce,       // rank a's is the sum of all shards
  Gather,       // row r is shard r; where b is set, one's own row is there already
  Broadcast,    // everyone's is shard a; where b is set, a's too
  Send,         // rank b's is shard a
  Exchange,     // row r is row `me` of shard r
  Shift,        // rank r's is the shard of the rank a places before it, of whatever size
};

struct ProgramKey {
  Pattern pattern;
  int32_t a, b, op;
  int64_t columns;
  bool operator==(const ProgramKey& other) const {
    return pattern == other.pattern && a == other.a && b == other.b && op == other.op && columns == other.columns;
  }
};

struct Program {
  std::vector<gt_region> regions;
  std::vector<gt_corner> corners;
  std::vector<int32_t> partner;
  std::vector<uint8_t> tie;
  gt_program plain;
};

// The programs of one rank, each written once.
class Programs {
 public:
  Programs(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  const gt_program* get(const ProgramKey& key);
  void trim();  // forgets all where there are too many; between calls, since programs in use must stay

 private:
  struct ProgramKeyHash {
    size_t operator()(const ProgramKey& key) const;
  };
  const int rank_, ranks_;
  std::unordered_map<ProgramKey, std::unique_ptr<Program>, ProgramKeyHash> written_;
};

}  // namespace gt::collective
