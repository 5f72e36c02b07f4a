// One call of gt_run_moves at one rank: what run_moves.cpp and offer.cpp hand to each other.
#pragma once
#include "state.h"

namespace gt {

struct MovesCall {
  gt_transport& t;
  const gt_move* moves;
  int32_t count;
  uint64_t agreement, site;
  const gt_hooks* hooks;

  // Whom it has to do with, over all moves, and how.
  const int32_t* partner = nullptr;
  const uint8_t* tie = nullptr;
  int32_t partners = 0;
  uint8_t ties = 0;             // of all partners

  // How partners get at this rank's shards.
  StagedCopy* staged = nullptr; // copies and Places
  bool stage_all = false;       // no source is read in place
  bool in_place = false;        // some source is read in place
  uint8_t flags = 0;            // of the entries: kInline, kPacked
  uint64_t source = 0;          // of the entries
  uint64_t bytes = 0;           // of sources that partners read
  Place only = {};              // of the only move
  alignas(64) char inline_data[kInlineBytes] = {};

  bool waits_for(uint8_t t) const { return (t & GT_IT_WRITES) || (in_place && (t & GT_IT_READS)); }
};

// Makes this rank's shards ready for the others: leaves them in place, or stages copies, and notes where they are.
int offer(MovesCall&);
// What a partner's entry says of its shard and of its new shard in this move.
gt_shard offered_source(const Peer&, const Entry&, int32_t move);
gt_shard offered_target(const Peer&, const Entry&, int32_t move);

}  // namespace gt
