// What a dim adds to what a rank moves depends on the rank's digits on the axes that split it, and is seldom more than
// a few different sizes. So the sizes of a dim are a table by digits, the digits are those where extremes may lie, and
// those of dims that share no axis are multiplied, not those of all ranks.
#include "extremes.h"

#include <algorithm>
#include <map>
#include <set>

#include "paths.h"

namespace gt::pricing {
namespace {

// Axes, outermost first.
struct Path {
  int depth = 0;
  std::array<int8_t, kAxes> at{};

  void add(int axis) { at[depth++] = (int8_t)axis; }
  bool has(int axis) const { return std::find(at.begin(), at.begin() + depth, axis) != at.begin() + depth; }
  Path without(int start) const {
    Path rest;
    for (int k = start; k < depth; k++) rest.add(at[k]);
    return rest;
  }
  const int8_t* begin() const { return at.data(); }
  const int8_t* end() const { return at.data() + depth; }
};

int common_start(const Path& a, const Path& b) {
  int k = 0;
  while (k < a.depth && k < b.depth && a.at[k] == b.at[k]) k++;
  return k;
}

// What each axis does: see boxings/roles.py. Sets of axes are bits.
struct Roles {
  std::array<Path, kDims> cut, by_dst, sharing;
  unsigned reduced = 0, loose = 0, tied = 0, copies = 0;
};

Roles roles_of(const Problem& of, const State& src, const State& dst) {
  Roles does;
  for (int axis = 0; axis < of.axes; axis++) {
    const int s = src[axis], t = dst[axis];
    if (of.sizes[axis] == 1) continue;
    if (is_split(s)) does.cut[s].add(axis);
    if (is_split(t)) does.by_dst[t].add(axis);
    if (is_partial(s) && s != t) does.reduced |= 1u << axis;
    if (t == kSum && s != kSum) (is_split(s) ? does.loose : does.tied) |= 1u << axis;
    if (s == kBroadcast) does.copies |= 1u << axis;
  }
  const auto goes = [&](int d) {                     // does an axis that splits dim d of src go?
    const Path& path = does.cut[d];
    const auto* from = path.begin() + common_start(path, does.by_dst[d]);
    return std::any_of(from, path.end(), [&](int axis) { return !(does.loose >> axis & 1); });
  };
  bool moving = does.reduced;
  for (int d = 0; d < of.dims; d++) moving |= goes(d);
  if (does.tied && moving && of.dims) {
    std::array<int64_t, kDims> parts;
    int64_t more = 1;
    for (int d = 0; d < of.dims; d++) {
      parts[d] = 1;
      for (int axis : does.by_dst[d]) parts[d] *= of.sizes[axis];
    }
    for (int axis = 0; axis < of.axes; axis++) more *= does.tied >> axis & 1 ? of.sizes[axis] : 1;
    Path& divided = does.by_dst[tied_dim(of, parts, more)];
    for (int axis = 0; axis < of.axes; axis++)
      if (does.tied >> axis & 1) divided.add(axis);
  }
  for (int d = 0; d < of.dims; d++) {
    if (!goes(d)) continue;
    const Path& path = does.by_dst[d];
    for (int k = common_start(does.cut[d], path); k < path.depth; k++)
      if (src[path.at[k]] == kBroadcast) does.sharing[d].add(path.at[k]);
  }
  return does;
}

using Digits = std::vector<int64_t>;

// Where along an axis the extremes are: at both ends, and where the larger parts end; and near the ends, where a loose
// axis splits the same dim: there the first may want what it holds, and the next may not.
Digits extreme_digits(const Problem& of, const Roles& does, int axis) {
  const int64_t parts = of.sizes[axis];
  std::set<int64_t> digits{0};
  for (int d = 0; d < of.dims; d++) {
    const bool near = std::any_of(does.cut[d].begin(), does.cut[d].end(),
                                  [&](int other) { return does.loose >> other & 1; });
    for (const Path* path : {&does.cut[d], &does.by_dst[d]}) {
      if (!path->has(axis)) continue;
      for (int64_t i = 0; near && i < std::min<int64_t>(parts, 3); i++) digits.insert({i, parts - 1 - i});
      int64_t outer = 1;
      for (int other : *path) {
        if (other == axis) break;
        outer *= of.sizes[other];
      }
      const int64_t more = (of.shape[d] + outer - 1) / outer % parts;
      digits.insert({parts - 1, more, std::max<int64_t>(more - 1, 0)});
    }
  }
  return {digits.begin(), digits.end()};
}

// Counts through all combinations of digits, the last fastest.
struct Odometer {
  explicit Odometer(std::vector<size_t> sizes) : sizes(std::move(sizes)), at(this->sizes.size()) {}

  bool next() {
    for (size_t i = sizes.size(); i-- > 0;) {
      if (++at[i] < sizes[i]) return true;
      at[i] = 0;
    }
    return false;
  }

  std::vector<size_t> sizes, at;
};

using Table = std::shared_ptr<const DimTable>;

// Digits that give parts of the same sizes, where a path cuts lengths that are one of `lengths`: on each axis a part is
// larger by one element below a threshold.
std::vector<uint32_t> classes_by_size(const std::set<int64_t>& lengths, int64_t outer, int64_t parts,
                                      const Digits& digits) {
  std::vector<uint32_t> classes;
  for (int64_t digit : digits) {
    uint32_t own = 0;
    std::set<int64_t> thresholds;
    for (int64_t n : lengths) thresholds.insert({n / outer % parts, (n + outer - 1) / outer % parts});
    for (int64_t threshold : thresholds) own += digit >= threshold;
    classes.push_back(own);
  }
  return classes;
}

// The same classes, counted from 0 without gaps.
size_t renumber(std::vector<uint32_t>& classes) {
  const std::set<uint32_t> all(classes.begin(), classes.end());
  for (uint32_t& one : classes) one = (uint32_t)std::distance(all.begin(), all.find(one));
  return all.size();
}

struct Builder {
  const Problem& of;
  const Roles& does;
  const std::array<Digits, kAxes>& digits;

  static unsigned bits(const Path& path) {
    unsigned all = 0;
    for (int axis : path) all |= 1u << axis;
    return all;
  }

  // The table of a dim. Axes that split it first on both sides give lengths, of which there are two at most, and parts
  // of no other dim; so the lengths are an axis of its own.
  Table table(int d, Tables& tables) const {
    Path path = does.cut[d], by_dst = does.by_dst[d];
    for (int axis : does.sharing[d]) path.add(axis);
    const int start = common_start(path, by_dst);
    int64_t parts = 1;
    for (int k = 0; k < start; k++) parts *= of.sizes[path.at[k]];
    const std::set<int64_t> lengths{of.shape[d] / parts, (of.shape[d] + parts - 1) / parts};
    path = path.without(start);
    by_dst = by_dst.without(start);
    const unsigned cut = bits(does.cut[d]), shared = bits(does.sharing[d]), either = bits(path) | bits(by_dst);
    std::string key;
    const auto tell = [&](int64_t value) { key.append((const char*)&value, sizeof value); };
    const auto tell_path = [&](const Path& one) {
      tell(one.depth);
      for (int axis : one) tell(axis);
    };
    tell(d);
    for (int64_t n : lengths) tell(n);
    tell(-1);
    tell_path(path);
    tell_path(by_dst);
    for (unsigned role : {does.loose, does.copies, cut, shared}) tell(either & role);
    for (int axis = 0; axis < of.axes; axis++) {
      for (int64_t digit : either >> axis & 1 ? digits[axis] : Digits{}) tell(digit);
      tell(-1);
    }
    auto& known = tables[key];
    if (!known) known = Making{*this, path, by_dst, lengths, cut, does.copies & ~shared, shared}.build(d);
    return known;
  }

  struct Making {
    const Builder& from;
    const Path &path, &by_dst;
    const std::set<int64_t>& lengths;
    const unsigned cut, matched, shared;

    Table build(int d) const {
      DimTable all;
      const std::vector<int64_t> each(lengths.begin(), lengths.end());
      std::vector<std::vector<int64_t>> chosen;      // per axis of the table, a digit of each class
      std::vector<size_t> counts;
      for (int axis = 0; axis < from.of.axes; axis++) {
        if (!(path.has(axis) || by_dst.has(axis))) continue;
        const Digits& digits = from.digits[axis];
        std::vector<uint32_t> classes(digits.size());
        for (size_t i = 0; i < classes.size(); i++) classes[i] = (uint32_t)i;
        if (!path.depth || !by_dst.depth) {          // all of the dim is wanted, or held: only sizes of parts matter
          const Path& only = path.depth ? path : by_dst;
          int64_t outer = 1;
          for (const auto* at = only.begin(); *at != axis; at++) outer *= from.of.sizes[*at];
          classes = classes_by_size(lengths, outer, from.of.sizes[axis], digits);
        }
        const size_t count = renumber(classes);
        chosen.emplace_back(count);
        for (size_t i = 0; i < classes.size(); i++) chosen.back()[classes[i]] = digits[i];
        counts.push_back(count);
        all.axes.push_back({axis, std::move(classes), count});
      }
      if (each.size() > 1) {
        chosen.push_back({0, 1});
        counts.push_back(2);
        all.axes.push_back({kAxes + d, {0, 1}, 2});
      }
      Odometer at(counts);
      int64_t own[kAxes + kDims] = {};
      do {
        for (size_t i = 0; i < counts.size(); i++) own[all.axes[i].axis] = chosen[i][at.at[i]];
        const Sizes one = sizes(each[own[kAxes + d]], own);
        const auto same = std::find(all.different.begin(), all.different.end(), one);
        all.index.push_back((uint32_t)(same - all.different.begin()));
        if (same == all.different.end()) all.different.push_back(one);
      } while (at.next());
      return std::make_shared<const DimTable>(std::move(all));
    }

    // The sizes of the axes of a path, and the digits of those that are in `chosen`.
    struct Read {
      int depth = 0;
      int64_t sizes[kAxes], digits[kAxes];

      Range part(int64_t n) const { return part_at(n, depth, sizes, digits); }
      int64_t common(int64_t n, Range within) const { return overlap(n, depth, sizes, digits, within); }
    };

    Read read(const Path& along, const int64_t* own, unsigned chosen) const {
      Read all;
      for (int axis : along) {
        all.sizes[all.depth] = from.of.sizes[axis];
        all.digits[all.depth++] = chosen >> axis & 1 ? own[axis] : kAny;
      }
      return all;
    }

    Sizes sizes(int64_t n, const int64_t* own) const {
      const Range wanted = read(by_dst, own, ~0u).part(n), sent = read(path, own, ~0u).part(n);
      return {read(path, own, from.does.loose).common(n, wanted), read(path, own, cut).common(n, wanted),
              read(by_dst, own, matched).common(n, sent), read(by_dst, own, ~shared).common(n, sent)};
    }
  };
};

// The different sizes of dims that share axes, multiplied.
std::vector<Sizes> sizes_together(const std::vector<const DimTable*>& dims) {
  if (dims.size() == 1) return dims[0]->different;
  std::map<int, std::vector<std::vector<size_t>>> ways;  // per axis, by digit: where it leads in each table
  size_t combinations = 1;
  for (size_t k = 0; k < dims.size(); k++) {
    size_t step = 1;
    for (size_t i = dims[k]->axes.size(); i-- > 0;) {
      const auto& own = dims[k]->axes[i];
      auto& of_axis = ways[own.axis];
      of_axis.resize(own.class_of.size(), std::vector<size_t>(dims.size()));
      for (size_t digit = 0; digit < own.class_of.size(); digit++) of_axis[digit][k] = own.class_of[digit] * step;
      step *= own.classes;
    }
    combinations *= dims[k]->different.size();
  }
  std::vector<size_t> counts;
  std::vector<const std::vector<std::vector<size_t>>*> axes;
  for (auto& [axis, of_axis] : ways) {
    std::sort(of_axis.begin(), of_axis.end());
    of_axis.erase(std::unique(of_axis.begin(), of_axis.end()), of_axis.end());
    counts.push_back(of_axis.size());
    axes.push_back(&of_axis);
  }
  std::vector<bool> seen(combinations);
  std::vector<Sizes> together;
  Odometer at(counts);
  do {
    size_t key = 0;
    std::array<const Sizes*, kDims> own;
    for (size_t k = 0; k < dims.size(); k++) {
      size_t place = 0;
      for (size_t i = 0; i < axes.size(); i++) place += (*axes[i])[at.at[i]][k];
      const size_t which = dims[k]->index[place];
      key = key * dims[k]->different.size() + which;
      own[k] = &dims[k]->different[which];
    }
    if (seen[key]) continue;
    seen[key] = true;
    Sizes product{1, 1, 1, 1};
    for (size_t k = 0; k < dims.size(); k++)
      for (size_t i = 0; i < product.size(); i++) product[i] *= (*own[k])[i];
    together.push_back(product);
  } while (at.next());
  return together;
}

// The dims, those that share an axis, by way of others too, together.
std::vector<std::vector<const DimTable*>> joined(const std::vector<Table>& dims) {
  std::vector<std::vector<const DimTable*>> groups;
  std::vector<unsigned> bits;
  for (const Table& dim : dims) {
    unsigned own = 0;
    for (const auto& one : dim->axes) own |= 1u << one.axis;
    std::vector<const DimTable*> group;
    for (size_t g = groups.size(); g-- > 0;) {
      if (!(bits[g] & own)) continue;
      own |= bits[g];
      group.insert(group.end(), groups[g].begin(), groups[g].end());
      groups.erase(groups.begin() + (ptrdiff_t)g);
      bits.erase(bits.begin() + (ptrdiff_t)g);
    }
    group.push_back(dim.get());
    groups.push_back(std::move(group));
    bits.push_back(own);
  }
  return groups;
}

}  // namespace

int tied_dim(const Problem& of, const std::array<int64_t, kDims>& parts, int64_t more) {
  int best = 0;
  const auto is_even = [&](int d) { return of.shape[d] % (parts[d] * more) == 0; };
  const auto length = [&](int d) { return (double)of.shape[d] / parts[d]; };
  for (int d = 1; d < of.dims; d++)
    if (std::make_pair(is_even(d), length(d)) > std::make_pair(is_even(best), length(best))) best = d;
  return best;
}

Traffic extremes(const Problem& of, const State& src, const State& dst, Tables& tables) {
  const Roles does = roles_of(of, src, dst);
  std::array<Digits, kAxes> digits;
  unsigned cutting = 0, moves = 0;
  for (int d = 0; d < of.dims; d++) {
    cutting |= Builder::bits(does.by_dst[d]);
    moves |= Builder::bits(does.cut[d]) | Builder::bits(does.sharing[d]);
  }
  int64_t terms = 1, alike = 1;                      // terms of a sum; and the ranks that want each element of a source
  for (int axis = 0; axis < of.axes; axis++) {
    if ((cutting | moves) >> axis & 1) digits[axis] = extreme_digits(of, does, axis);
    if (does.reduced >> axis & 1) terms *= of.sizes[axis];
    const bool own = !(does.reduced >> axis & 1) && (does.loose >> axis & 1 || !is_split(src[axis]));
    // an axis of which the first rank takes all is tied, and in no path
    if (!(cutting >> axis & 1) && !own && !(does.tied >> axis & 1)) alike *= of.sizes[axis];
  }
  const Builder builder{of, does, digits};
  std::vector<Table> dims;
  for (int d = 0; d < of.dims; d++) dims.push_back(builder.table(d, tables));
  std::vector<std::vector<Sizes>> factors;
  std::vector<size_t> counts;
  for (const auto& group : joined(dims)) {
    factors.push_back(sizes_together(group));
    counts.push_back(factors.back().size());
  }
  int64_t received = 0, sent = 0, touched = 0;
  Odometer at(counts);
  do {
    Sizes all{1, 1, 1, 1};
    for (size_t g = 0; g < factors.size(); g++)
      for (size_t i = 0; i < all.size(); i++) all[i] *= factors[g][at.at[g]][i];
    received = std::max(received, terms * all[0] - all[1]);
    sent = std::max(sent, alike * all[2] - all[3]);
    touched = std::max(touched, terms * all[0]);
  } while (at.next());
  return {std::max(received, sent), touched};
}

}  // namespace gt::pricing
