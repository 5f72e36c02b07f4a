// What one step of a boxing on one placement moves, by arithmetic on the sizes of its axes (boxings/traffic.py).
#pragma once
#include <stdint.h>

#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace gt::pricing {

constexpr int kAxes = 8, kDims = 16;                 // LIMITS of boxings/native_prices.py

// An nd-sbp as numbers, one per axis: the dim of a split; the others below zero (`axis_codes`).
constexpr int kBroadcast = -1, kSum = -2;
using State = std::array<int8_t, kAxes>;

inline bool is_split(int code) { return code >= 0; }
inline bool is_partial(int code) { return code < kBroadcast; }

// The axes of a placement, and a tensor on it.
struct Problem {
  int axes, dims;
  std::array<int64_t, kAxes> sizes;
  std::array<int64_t, kDims> shape;

  int64_t ranks() const;
  int64_t numel() const;
};

// Elements: that the busiest rank receives or sends, and that the rank reads that reads most, its own included.
struct Traffic {
  int64_t crossing, touched;
};

struct LeastTraffic {
  double crossing, touched;
};

// What ranks read of a term, hold of that, send, and hold of that: along some dims, by one combination of digits.
using Sizes = std::array<int64_t, 4>;

// Sizes along a dim, by the digits on the axes that split it. Digits that come to the same are of one class.
struct DimTable {
  struct Axis {
    int axis;
    std::vector<uint32_t> class_of;                  // by the number of the digit
    size_t classes;
  };
  std::vector<Axis> axes;
  std::vector<uint32_t> index;                       // by classes, the last axis fastest: into those that differ
  std::vector<Sizes> different;
};

// Tables of dims, which many steps have in common; for one search.
using Tables = std::unordered_map<std::string, std::shared_ptr<const DimTable>>;

Traffic traffic(const Problem& of, const State& src, const State& dst, Tables& tables);
LeastTraffic least_traffic(const Problem& of, const State& src, const State& dst);
double least_received(const Problem& of, const State& src, const State& dst);

}  // namespace gt::pricing
