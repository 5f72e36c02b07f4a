// How the ranks of a transport connect: unix sockets that live for the handshake only, and file descriptors through
// them.
#pragma once
#include "state.h"

namespace gt {

// Starts listening, and writes the address. An empty string, or what went wrong.
std::string handshake_listen(gt_transport&);

// Gives every other rank this rank's files, and maps theirs. A status; gt_blame has the text.
int handshake_connect(gt_transport&, const char* const* addresses);

}  // namespace gt
