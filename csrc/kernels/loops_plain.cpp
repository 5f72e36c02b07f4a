// The loops for any processor. See loops_body.h.
#define GT_LEVEL 0
#define GT_LEVEL_NAME plain
#define GT_BYTES 16
#define GT_HERE
#include "loops_body.h"
