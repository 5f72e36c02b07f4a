// Where the user's program stands: a number for the innermost instruction that is neither torch's nor ours.
#pragma once
#include <cstdint>

namespace gt {

// The same in every process for the same instruction of the same file; 0 where there is none.
uint64_t call_site();
void ours(const char* const* prefixes, int count);   // folders whose files are not the user's

}  // namespace gt
